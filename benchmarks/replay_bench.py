#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Nanoseconds an event of our own code, for each trace given.

    python benchmarks/replay_bench.py examples/traces/*.npz

Each trace is replayed several times on a simulated device without a limit. Timed is the loop
over the events: allocator, simulated device and replay, without reading the file. Driver time is
modelled and not in it. "driver calls" must not move between two runs or two builds of one policy: a
change that makes the replay faster by doing something else shows there.
"""

import argparse
import statistics

from gpumemx import TraceError, _core, load_trace


def measure(path: str, runs: int) -> str:
    trace = load_trace(path)
    columns = (trace.op, trace.size, trace.stream, trace.time_us, trace.slots)
    times = []
    calls = set()
    for _ in range(runs):
        engine = _core.Replay(*columns)
        engine.run()
        report = engine.report()
        times.append(report["host_ns_per_event"])
        calls.add(sum(report["driver_calls"].values()))
    if len(calls) != 1:
        raise SystemExit(f"{path}: the driver calls differ from run to run: {sorted(calls)}")
    name = path.rsplit("/", 1)[-1]
    median, least = statistics.median(times), min(times)
    return f"{name:24} {len(trace):>10,} {median:>10,.0f} {least:>10,.0f} {calls.pop():>12,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--runs", type=int, default=5, help="default: 5")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs must be 1 or more")
    print(f"{'trace':24} {'events':>10} {'median ns':>10} {'min ns':>10} {'driver calls':>12}")
    for path in args.files:
        try:
            print(measure(path, args.runs), flush=True)
        except TraceError as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
