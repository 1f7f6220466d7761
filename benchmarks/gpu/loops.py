# SPDX-License-Identifier: BSD-3-Clause
"""Training loops on each allocator, with the whole device and with little more than what is live.

Live is the peak of what native's uncapped loop asked for; --caps are multiples of it. Printed for
each loop, cap and allocator, after the first three steps:

items/s      tokens or pixels a second of the device's time, and as a share of native's uncapped
reserved     peak, by live
allocations  the longest, 99.9th and 99th percentile, their number and their share of the time:
             inside the allocator's virtual functions, all threads (allocator_probe.cpp says how
             it is taken)
calls        syncs (cudaDeviceSynchronize, cudaStreamSynchronize, cudaEventSynchronize), frees and
             mallocs (cudaFree, cudaMalloc) of the whole process (call_counter.cpp). The loops make
             none, so these are torch's or the allocator's. gpumemx calls the driver: "driver" is
             how often it waited there or freed an ordinary allocation

Medians of the runs, but the longest allocation of all. python loops.py [--loops LOOP ...]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack

from harness import (
    GIB,
    Job,
    Result,
    Worker,
    add_arguments,
    calls_made,
    driver_figures,
    median,
    serve,
    set_cap,
    show,
    table,
)

CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaFree",
    "cudaMalloc",
)
WARM = 3
LOOPS = ("bert", "llm", "unet", "resnet50", "resnet152")
HEAD = (
    "allocator",
    "cap",
    "items/s",
    "of native",
    "2nd half",
    "reserved",
    "longest us",
    "p99.9",
    "p99",
    "count",
    "% of time",
    "syncs",
    "frees",
    "mallocs",
    "driver",
    "retries",
    "runs",
)


# --- in a worker


def work(job: Job) -> Result:
    """Run one loop; figures from after step WARM."""
    if job["tiny"]:
        return dry_run(job)
    import allocator_probe as probe
    import numpy as np
    import torch
    import workloads

    set_cap(job["cap"])
    probe.time_allocations()
    # Events rather than synchronize(): no step waits for the device but where the loop does.
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    items, at_middle = 0, 0
    calls, driver = {}, {}
    half = WARM + (job["steps"] - WARM) // 2
    failed = None
    step = 0
    try:
        for step, done in enumerate(workloads.begin(job["loop"], job["steps"]), 1):
            if step > WARM:
                items += done
            if step == WARM:
                torch.cuda.synchronize()
                calls, driver = {name: calls_made(name) for name in CALLS}, driver_figures()
                probe.forget_times()
                begin.record()
            if step == half:
                middle.record()
                at_middle = items
        end.record()
    except torch.OutOfMemoryError as error:
        failed = f"out of memory at step {step + 1}: {str(error)[:160]}"
    made = {name: calls_made(name) - before for name, before in calls.items()}
    after = driver_figures()
    times = probe.allocation_times() / 1e3
    stats = torch.cuda.memory_stats()
    if failed:
        return {"failed": failed}
    torch.cuda.synchronize()
    waits = None
    if after:
        waits = sum(after["calls"].get(k, 0) - driver["calls"].get(k, 0) for k in ("wait", "free"))
    elapsed = begin.elapsed_time(end)  # ms
    return {
        "rate": 1e3 * items / elapsed,
        "later rate": 1e3 * (items - at_middle) / middle.elapsed_time(end),
        "requested": stats.get("requested_bytes.all.peak", 0),
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats.get("num_alloc_retries", 0),
        "allocations": len(times),
        "share": 100 * float(times.sum()) / (1e3 * elapsed),
        "longest": float(times.max()),
        "p99.9": float(np.percentile(times, 99.9)),
        "p99": float(np.percentile(times, 99)),
        "waits": waits,
        **made,
    }


def dry_run(job: Job) -> Result:
    import time

    import workloads

    begin = time.perf_counter()
    items = sum(workloads.begin(job["loop"], job["steps"], tiny=True))
    rate = items / (time.perf_counter() - begin)
    return {"rate": rate, "later rate": rate, "requested": 1, "reserved": 1}


# --- in the parent


Runs = dict[tuple[float | None, str], list[Result]]


def measure(loop: str, workers: dict[str, Worker], args: argparse.Namespace) -> tuple[Runs, int]:
    """Run every kind in turn; return the results of each and how many bytes are live."""
    runs: Runs = defaultdict(list)
    live = 0
    for _ in range(args.runs):
        for cap in (None, *args.caps):
            for who, worker in workers.items():
                results = runs[cap, who]
                if (results and results[0].get("failed")) or (cap is not None and live == 0):
                    continue
                limit = None if cap is None else int(cap * live)
                result = worker.run(loop=loop, steps=args.steps, cap=limit, tiny=args.tiny)
                results.append(result)
                if cap is None and live == 0 and not result.get("failed"):
                    live = result["requested"] or result["allocated"]
                if failed := result.get("failed"):
                    print(f"{loop}, {who}, cap {cap or 'none'}: {failed}", flush=True)
    return runs, live


def rows(runs: Runs, live: int) -> list[list[str]]:
    """Return the lines of the table of one loop."""
    whole = median(r["rate"] for r in runs.get((None, "native"), []) if "rate" in r)
    lines = []
    for (cap, who), results in runs.items():
        passed = [r for r in results if not r.get("failed")]
        line = [who, "none" if cap is None else f"{cap:.2f}"]
        if not passed:
            lines.append([*line, "failed", *["-"] * (len(HEAD) - 3)])
            continue

        def middle(key: str, passed: list[Result] = passed) -> float:
            return median(r[key] for r in passed if r.get(key) is not None)

        synchronized = median(
            sum(r[name] for name in CALLS if name.endswith("Synchronize"))
            for r in passed
            if CALLS[0] in r
        )
        line += [
            f"{middle('rate'):,.0f}",
            show(middle("rate") / whole, ".3f"),
            f"{middle('later rate'):,.0f}",
            show(middle("reserved") / live if live else None, ".3f"),
            show(max((r["longest"] for r in passed if "longest" in r), default=None), ",.0f"),
            show(middle("p99.9"), ",.1f"),
            show(middle("p99"), ",.1f"),
            show(middle("allocations"), ",.0f"),
            show(middle("share"), ".1f"),
            show(synchronized, ".0f"),
            show(middle("cudaFree"), ".0f"),
            show(middle("cudaMalloc"), ".0f"),
            show(middle("waits"), ".0f"),
            show(middle("retries"), ".0f"),
            f"{len(passed)} of {len(results)}",
        ]
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, runs=3)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--steps", type=int, default=40, help="of each run; default: 40")
    parser.add_argument(
        "--caps", type=float, nargs="*", default=[1.05, 1.02], help="by live; default: 1.05 1.02"
    )
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, work)
        return
    if args.steps < 2 * WARM:
        parser.error(f"--steps must be {2 * WARM} or more")
    with ExitStack() as stack:
        workers = {
            who: stack.enter_context(Worker(who, counted=not args.tiny)) for who in args.allocators
        }
        for loop in args.loops:
            runs, live = measure(loop, workers, args)
            print(f"\n{loop}: live {live / GIB:.3f} GiB, {args.steps} steps, {args.runs} runs")
            table(HEAD, rows(runs, live))


if __name__ == "__main__":
    main()
