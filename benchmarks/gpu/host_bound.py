# SPDX-License-Identifier: BSD-3-Clause
"""What the allocator costs a program that is bound by the host, with each allocator in turn.

empty    microseconds for torch.empty(...) on the device and its free, in Python
monitor  an empty `with gpumemx.monitor():`
history  the same for 1 KiB while a history is recorded, without and with Python stacks, 20 calls
         deep; a pair adds three entries
step     microseconds for forward and backward of a model of many small kernels: 60 times linear,
         norm and GELU on 8 x 64 numbers, so the device waits for the host

python host_bound.py [--runs N]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from harness import MIB, Job, Result, Worker, add_arguments, median, serve, show, table

SIZES = {"empty, 1 KiB": 1 << 10, "empty, 1 MiB": MIB, "empty, 64 MiB": 64 * MIB}
MONITOR = "empty monitor"  # is to stay under 20
HISTORIES: dict[str, dict[str, Any]] = {
    "history, no stacks": {"context": None},
    "history, Python stacks": {"context": "all", "stacks": "python"},
}
DEPTH = 20  # of calls above a recorded allocation: what a model in a training loop has


# --- in a worker


def microseconds(call: Callable[[], object], count: int, *, tiny: bool) -> float:
    """Return microseconds a call, of the median of five rounds after one that warms up."""
    import torch

    def wait() -> None:
        if not tiny:
            torch.cuda.synchronize()

    rounds = []
    for _ in range(6):
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        rounds.append(1e6 * (time.perf_counter() - begin) / count)
    return median(rounds[1:])


def deep(call: Callable[[], object], depth: int = DEPTH) -> object:
    return deep(call, depth - 1) if depth else call()


def with_histories(count: int) -> Result:
    """Return microseconds a pair of 1 KiB by kind of history; none of what has no history."""
    import torch

    def pair() -> None:
        torch.empty(1 << 10, dtype=torch.uint8, device="cuda")

    def rounds() -> float:
        return microseconds(lambda: [pair() for _ in range(count)], 1, tiny=False) / count

    found = {"history off": float(deep(rounds))}
    for name, arguments in HISTORIES.items():
        try:
            torch.cuda.memory._record_memory_history(max_entries=100_000, **arguments)
        except RuntimeError:  # cudaMallocAsync
            continue
        found[name] = float(deep(rounds))
        torch.cuda.memory._record_memory_history(enabled=None)
    return found


def work(job: Job) -> Result:
    import gpumemx
    import torch
    from torch import nn

    tiny = job["tiny"]
    device = torch.device("cpu" if tiny else "cuda")
    count = 50 if tiny else 10000
    found = {}
    for name, size in SIZES.items():

        def pair(size: int = size) -> None:
            torch.empty(size, dtype=torch.uint8, device=device)

        found[name] = microseconds(pair, count, tiny=tiny)

    def empty_monitor() -> None:
        with gpumemx.monitor():
            pass

    found[MONITOR] = microseconds(empty_monitor, count, tiny=tiny)

    if not tiny:
        found |= with_histories(count)

    torch.manual_seed(0)
    parts = [
        part
        for _ in range(2 if tiny else 60)
        for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())
    ]
    model = nn.Sequential(*parts).to(device)
    batch = torch.randn(8, 64, device=device)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad(set_to_none=True)

    found["step"] = microseconds(step, 2 if tiny else 100, tiny=tiny)
    return found


# --- in the parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, runs=5)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, work)
        return
    runs: dict[str, list[Result]] = defaultdict(list)
    with ExitStack() as stack:
        workers = {who: stack.enter_context(Worker(who)) for who in args.allocators}
        for _ in range(args.runs):
            for who, worker in workers.items():
                result = worker.run(tiny=args.tiny)
                if failed := result.get("failed"):
                    print(f"{who}: {failed}", flush=True)
                else:
                    runs[who].append(result)
    first = args.allocators[0]
    print(f"\nMicroseconds, median of {args.runs} runs in turn, and by {first}'s")
    rows = []
    for name in (*SIZES, MONITOR, "history off", *HISTORIES, "step"):
        times = {who: median(r[name] for r in runs[who] if name in r) for who in workers}
        cells = [f"{show(t, ',.2f')} ({show(t / times[first], '.3f')})" for t in times.values()]
        rows.append([name, *cells])
    table(["", *workers], rows)


if __name__ == "__main__":
    main()
