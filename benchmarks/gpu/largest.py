# SPDX-License-Identifier: BSD-3-Clause
"""The largest work that a card of 24 GiB takes, with each allocator.

A loop's scale (of its batches; llm: of its texts) is bisected under a cap until it passes and a
little more does not. Printed with the speed at that scale, and at the scale that the first
allocator (native) takes, where the others do the same work. Each loop and allocator has a process
of its own.

The cap is torch's set_per_process_memory_fraction. Of cudaMallocAsync it limits what is live, not
what is reserved.

python largest.py [--loops LOOP ...] [--cap GIB]
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import ExitStack

from harness import GIB, Job, Result, Worker, add_arguments, median, serve, set_cap, show, table

# Where the search begins: passes on most allocators, and on none.
BEGIN = {"bert": (0.8, 2.2), "unet": (0.6, 1.8), "llm": (0.22, 0.7)}


# --- in a worker


def speed(job: Job, scale: float) -> float | None:
    """Return items a second, or None if the loop does not pass."""
    import torch
    import workloads

    begin, items = time.perf_counter(), 0
    try:
        for items_of_step in workloads.begin(job["loop"], job["steps"], scale, tiny=job["tiny"]):
            items += items_of_step
        if job["tiny"]:
            return items / (time.perf_counter() - begin) if scale < 1.5 else None
        torch.cuda.synchronize()
        return items / (time.perf_counter() - begin)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if not job["tiny"]:
            torch.cuda.empty_cache()


def work(job: Job) -> Result:
    import torch

    if not job["tiny"]:
        set_cap(int(job["cap"] * GIB))
    low, high = job["low"], job["high"]
    while speed(job, low) is None:
        low, high = low / 1.5, low
        if low < 0.05:
            return {"failed": f"does not pass at {high:.3f}"}
    while speed(job, high) is not None:
        low, high = high, high * 1.5
    while high / low > 1 + job["tolerance"]:
        middle = (low * high) ** 0.5
        if speed(job, middle) is None:
            high = middle
        else:
            low = middle
    if job["tiny"]:
        return {"scale": low, "rate": speed(job, low), "same": 0.0, "live": 0, "retries": 0}
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    rate = speed(job, low)
    stats = torch.cuda.memory_stats()
    same = None if job["same"] is None else speed(job, job["same"])
    return {
        "scale": low,
        "rate": rate,
        "same": same,
        "live": stats["allocated_bytes.all.peak"],
        "retries": stats.get("num_alloc_retries", 0) - retries,
    }


# --- in the parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, runs=1)
    parser.add_argument("--loops", nargs="+", choices=BEGIN, default=list(BEGIN))
    parser.add_argument("--cap", type=float, default=24, metavar="GIB", help="default: 24")
    parser.add_argument("--steps", type=int, default=12, help="of each try; default: 12")
    parser.add_argument("--tolerance", type=float, default=0.015, help="default: 0.015")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, work)
        return
    rows = []
    with ExitStack() as stack:
        workers = {who: stack.enter_context(Worker(who)) for who in args.allocators}
        for loop in args.loops:
            low, high = BEGIN[loop]
            found: dict[str, list[Result]] = {who: [] for who in workers}
            same = None
            for _ in range(args.runs):
                for who, worker in workers.items():
                    result = worker.run(
                        loop=loop,
                        low=low,
                        high=high,
                        same=same,
                        steps=args.steps,
                        cap=args.cap,
                        tolerance=args.tolerance,
                        tiny=args.tiny,
                    )
                    if result.get("failed"):
                        print(f"{loop}, {who}: {result['failed']}", flush=True)
                        continue
                    if same is None:
                        same, result["same"] = result["scale"], result["rate"]
                    found[who].append(result)
            for who, results in found.items():
                row = [loop, who]
                for key, unit, form in (
                    ("scale", 1, ".3f"),
                    ("live", GIB, ".2f"),
                    ("rate", 1, ",.0f"),
                    ("same", 1, ",.0f"),
                    ("retries", 1, ".0f"),
                ):
                    values = [r[key] / unit for r in results if r[key] is not None]
                    row.append(show(median(values), form))
                rows.append(row)
    first = args.allocators[0]
    print(f"\nLargest scale at {args.cap:g} GiB, {args.steps} steps, to {args.tolerance:.1%}")
    head = ["loop", "allocator", "scale", "live GiB", "items/s", f"at {first}'s scale", "retries"]
    table(head, rows)


if __name__ == "__main__":
    main()
