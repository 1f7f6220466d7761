# SPDX-License-Identifier: BSD-3-Clause
"""What torch.cuda.empty_cache() after every training step costs, and when the memory is back.

every step   milliseconds a step without and with it, by turns in one process, after a pass that
             loads every kernel; the share is of each turn's pair, the median of the turns
slow steps   the same with a pause of two seconds after every step, which is not timed: there every
             call is a single call. off: how far, at the worst of these calls, the driver's free
             memory on return was from what the allocator says it gave back
last call    of the habit: what the driver has back on return, what later, after how many
             milliseconds that was there, and what was still cached after a second in which nobody
             called the allocator
one call     after a loop is over: its time, what it gave back, and how far the driver is from that
             on return

python habits.py [--loops LOOP ...] [--runs N] [--slow LOOP ...]
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import ExitStack
from typing import Any

from harness import MIB, Job, Result, Worker, add_arguments, median, serve, show, table

LOOPS = ("bert", "resnet50", "llm", "unet", "resnet152")
WARM = 3


# --- in a worker


def free_and_reserved() -> tuple[int, int]:
    """Return bytes: the device's free ones as the driver says, and the allocator's."""
    import torch

    return torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()


def empty_cache_checked() -> int:
    """Empty the cache; return how many bytes the driver got less than the allocator gave."""
    import torch

    free, reserved = free_and_reserved()
    torch.cuda.empty_cache()
    free_after, reserved_after = free_and_reserved()
    return (reserved - reserved_after) - (free_after - free)


def milliseconds(job: Job, *, habit: bool) -> float:
    """Return milliseconds a step after the first steps."""
    import torch
    import workloads

    begin = 0.0
    for step, _ in enumerate(workloads.begin(job["loop"], job["steps"], tiny=job["tiny"]), 1):
        if habit and not job["tiny"]:
            torch.cuda.empty_cache()
        if step == WARM:
            synchronize(job)
            begin = time.perf_counter()
    synchronize(job)
    return 1e3 * (time.perf_counter() - begin) / int(job["steps"] - WARM)


def synchronize(job: Job) -> None:
    import torch

    if not job["tiny"]:
        torch.cuda.synchronize()


def every_step(job: Job) -> Result:
    milliseconds(job, habit=False)
    milliseconds(job, habit=True)
    pairs = []
    for turn in range(job["turns"]):
        order = (False, True) if turn % 2 == 0 else (True, False)
        times = {habit: milliseconds(job, habit=habit) for habit in order}
        pairs.append((times[False], times[True]))
    return {"pairs": pairs}


def slow_steps(job: Job) -> Result:
    """Time each step by itself, up to its end on the device, then pause."""
    import workloads

    milliseconds(job, habit=False)
    times: dict[bool, list[float]] = {False: [], True: []}
    off = [0]
    for habit in (False, True):
        loop = workloads.begin(job["loop"], job["steps"], tiny=job["tiny"])
        for step in range(1, job["steps"] + 1):
            begin = time.perf_counter()
            next(loop)
            if habit and not job["tiny"]:
                off.append(empty_cache_checked())
            synchronize(job)
            if step > WARM:
                times[habit].append(1e3 * (time.perf_counter() - begin))
            time.sleep(job["pause"])
    # Steps differ in size, and are the same in both: compare the sums.
    return {
        "pairs": [[sum(times[h]) / len(times[h]) for h in (False, True)]],
        "off": max(off, key=abs),
    }


def giving_back(job: Job) -> Result:
    """The last call of a habit, then a single call when the loop is over."""
    import torch
    import workloads

    loop: Any = workloads.begin(job["loop"], job["steps"])
    for _ in range(job["steps"] - 1):
        next(loop)
        torch.cuda.empty_cache()
    next(loop)
    torch.cuda.synchronize()
    before, _ = free_and_reserved()
    torch.cuda.empty_cache()
    begin = time.perf_counter()
    seen = [(0.0, torch.cuda.mem_get_info()[0])]
    while seen[-1][0] < 1.0:
        time.sleep(0.002)
        seen.append((time.perf_counter() - begin, torch.cuda.mem_get_info()[0]))
    last = seen[-1][1]
    settled = next(at for at, free in seen if free == last)
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    next(workloads.begin(job["loop"], 1))
    del loop
    gc.collect()
    torch.cuda.synchronize()
    _, reserved = free_and_reserved()
    begin = time.perf_counter()
    off = empty_cache_checked()
    took = time.perf_counter() - begin
    return {
        "on return": seen[0][1] - before,
        "later": last - seen[0][1],
        "settled": 1e3 * settled,
        "cached": cached,
        "gave": reserved - torch.cuda.memory_reserved(),
        "took": 1e3 * took,
        "off": off,
    }


def work(job: Job) -> Result:
    return {"every": every_step, "slow": slow_steps, "back": giving_back}[job["kind"]](job)


# --- in the parent


def lost(result: Result) -> list[str]:
    """Return the cells of a result that has pairs: ms without, with, and the share lost."""
    without, with_it = (median(pair[i] for pair in result["pairs"]) for i in (0, 1))
    share = median(pair[1] / pair[0] - 1 for pair in result["pairs"])
    return [f"{without:.1f}", f"{with_it:.1f}", f"{100 * share:.1f}"]


def mib(value: float) -> str:
    return f"{value / MIB:,.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, runs=3)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=["bert", "resnet50", "llm"])
    parser.add_argument("--slow", nargs="*", choices=LOOPS, default=["bert"], metavar="LOOP")
    parser.add_argument("--steps", type=int, default=20, help="of each pass; default: 20")
    parser.add_argument("--slow-steps", type=int, default=8, help="default: 8")
    parser.add_argument("--pause", type=float, default=2, help="seconds; default: 2")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, work)
        return
    if min(args.steps, args.slow_steps) <= WARM:
        parser.error(f"--steps and --slow-steps must be more than {WARM}")
    every, slow, back = [], [], []
    with ExitStack() as stack:
        workers = {who: stack.enter_context(Worker(who)) for who in args.allocators}

        def ask(who: str, **job: Any) -> Result | None:
            result = workers[who].run(**job, tiny=args.tiny)
            if failed := result.get("failed"):
                print(f"{who}, {job['loop']}, {job['kind']}: {failed}", flush=True)
                return None
            return result

        for loop in args.loops:
            for who in workers:
                common: Job = {"loop": loop, "steps": args.steps}
                if r := ask(who, kind="every", turns=args.runs, **common):
                    every.append([loop, who, *lost(r)])
                if not args.tiny and (r := ask(who, kind="back", **common)):
                    habit = [mib(r["on return"]), mib(r["later"]), show(r["settled"], ".0f")]
                    one = [mib(r["cached"]), show(r["took"], ".1f"), mib(r["gave"]), mib(r["off"])]
                    back.append([loop, who, *habit, *one])
        for loop in args.slow:
            for who in workers:
                common = {"loop": loop, "steps": args.slow_steps, "pause": args.pause}
                if r := ask(who, kind="slow", **common):
                    slow.append([loop, who, *lost(r), mib(r["off"])])
    head = ["loop", "allocator", "ms a step", "with empty_cache", "% more"]
    print(f"\nempty_cache() after every step, {args.runs} turns")
    table(head, every)
    print(f"\nThe same with a pause of {args.pause:g} s after every step")
    table([*head, "off MiB"], slow)
    print("\nMemory back, MiB: the habit's last call, and one call when the loop is over")
    head = ["loop", "allocator", "on return", "later", "after ms", "cached"]
    table([*head, "one call ms", "gave", "off"], back)


if __name__ == "__main__":
    main()
