# SPDX-License-Identifier: BSD-3-Clause
"""Steps a second and peak memory of the examples, with each allocator in turn.

steps/s         median of the runs, each a process of its own; in brackets, of the first allocator's
live, reserved  most bytes, MiB, and reserved by live
driver          ms that gpumemx spent in the driver: threads that allocate / of it for growth / all

python examples.py [--runs N] [--steps N] [--allocators NAME ...] [EXAMPLE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from harness import Job, Result, Worker, add_arguments, driver_figures, median, serve, show, table

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
STEPS = {"train_resnet50": 250, "finetune_encoder": 120, "decoder_kv_cache": 120}
DRIVER = ("seconds_inline", "seconds_growth", "seconds")


# --- in a worker


def work(job: Job) -> Result:
    """Run an example, unchanged, on the allocator of this process."""
    words = [str(EXAMPLES / f"{job['name']}.py"), "--steps", str(job["steps"])]
    sys.argv = words + (["--tiny", "--device", "cpu"] if job["tiny"] else [])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(sys.argv[0], run_name="__main__")
    figures = {
        "live": r"peak live ([\d.]+) MiB",
        "reserved": r"peak reserved ([\d.]+) MiB",
        "rate": r"([\d.]+) steps/s",
    }
    found = {key: re.search(pattern, out.getvalue()) for key, pattern in figures.items()}
    result = {key: float(match.group(1)) for key, match in found.items() if match}
    driver = {} if job["tiny"] else driver_figures()
    return result | {key: driver[key] for key in DRIVER if key in driver}


# --- in the parent


def row(who: str, runs: list[Result], first: list[Result]) -> list[str]:
    def of(key: str, among: list[Result] = runs) -> float:
        return median(r[key] for r in among if key in r)

    rate, live, reserved = of("rate"), of("live"), of("reserved")
    driver = " / ".join(show(of(key) * 1e3, ".0f") for key in DRIVER)
    return [
        who,
        f"{show(rate, '.2f')} ({show(rate / of('rate', first), '.3f')})",
        ", ".join(show(r.get("rate"), ".2f") for r in runs),
        show(live, ",.0f"),
        f"{show(reserved, ',.0f')} ({show(reserved / live, '.3f')})",
        driver,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, runs=5)
    parser.set_defaults(allocators=["native", "gpumemx"])
    parser.add_argument("--steps", type=int, help="instead of each example's own number")
    parser.add_argument("names", nargs="*", metavar="EXAMPLE", help="default: all")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, work)
        return
    with ExitStack() as stack:
        workers = {who: stack.enter_context(Worker(who)) for who in args.allocators}
        for name in args.names or STEPS:
            steps = args.steps or STEPS[name]
            runs: dict[str, list[Result]] = defaultdict(list)
            for _ in range(args.runs):
                for who, worker in workers.items():
                    result = worker.run(name=name, steps=steps, tiny=args.tiny)
                    if failed := result.get("failed"):
                        print(f"{name}, {who}: {failed}", flush=True)
                    else:
                        runs[who].append(result)
            print(f"\n{name}, {steps} steps")
            first = runs[args.allocators[0]]
            head = ["", "steps/s", "each", "live", "reserved", "driver"]
            table(head, [row(who, runs[who], first) for who in workers])


if __name__ == "__main__":
    main()
