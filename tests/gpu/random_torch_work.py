# SPDX-License-Identifier: BSD-3-Clause
"""Random torch work on gpumemx, with every byte checked, for as long as asked.

Several threads allocate tensors of random sizes on random streams, fill them, check them later
(sometimes on other streams, with record_stream), free them in any order and empty the cache.
Checked: the contents of every tensor when it dies, torch's counters against the sum over live
tensors, and reserved memory against what the driver says is gone.

Besides, unless --with leaves it out:
  graphs   a thread captures small CUDA graphs while the others go on, replays them for new values,
           checks all that they write, and drops them, sometimes before their outputs
  pools    some tensors are in MemPools, which die before their tensors or with the last
  history  the memory history is switched on and off, and snapshots are compared with the counters
  ipc      some tensors are shared with another process, which checks them

python random_torch_work.py [--minutes M] [--seed S] [--threads T] [--with PARTS] [--torch]

Exit status 1 when anything is wrong, or a part that was asked for was never done.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

# Kernels that are loaded at their first use take device memory then, 2 MiB at a time.
os.environ["CUDA_MODULE_LOADING"] = "EAGER"

import gpumemx
import torch
from random_work.compare import (
    MIB,
    History,
    Unexplained,
    rounded,
    used_by_this_process,
    used_on_device,
)
from random_work.graphs import Overhead
from random_work.graphs import warm_up as warm_up_graphs
from random_work.sharing import Consumer
from random_work.worker import MAX_GRAPHS, Plan, Worker

PARTS = ("graphs", "pools", "history", "ipc")
# The driver keeps memory of its own for graphs, in steps of 2 MiB. Most is there after the warm-up;
# without graphs nothing is left to explain.
OF_GRAPHS = 2 * MIB
MAX_THREADS = 8  # each has four of the 32 streams that torch makes: nobody else may capture on them


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--limit-mib", type=int, default=3000, help="live memory a thread")
    parser.add_argument(
        "--shared-card", action="store_true", help="other processes use the card meanwhile"
    )
    parser.add_argument("--torch", action="store_true", help="torch's own allocator, to compare")
    parser.add_argument(
        "--with", dest="parts", default=",".join(PARTS), help="parts, or none; default: %(default)s"
    )
    args = parser.parse_args()
    args.parts = frozenset(args.parts.split(",")) - {"none"}
    if unknown := args.parts - set(PARTS):
        parser.error(f"--with: {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if "graphs" in args.parts and args.threads > MAX_THREADS:
        parser.error(f"--threads: at most {MAX_THREADS} with graphs")
    return args


class Comparisons:
    """What the main thread compares while all workers stand still."""

    def __init__(
        self, workers: list[Worker], seed: int, overhead: Overhead | None, used: Callable[[], int]
    ) -> None:
        self.workers = workers
        self.per_graph = 0 if overhead is None else overhead.per_graph
        self.history = History(seed)
        self.base = torch.cuda.memory_allocated()
        self.unexplained = Unexplained(used)
        self.moments = 0
        self.wrong = 0

    def at_gate(self, with_history: bool) -> None:
        graphs = sum(len(w.graphs) for w in self.workers)
        expected = self.base + self.per_graph * graphs
        expected += sum(rounded(t) for w in self.workers for t in w.tensors())
        if torch.cuda.memory_allocated() != expected:
            self.wrong += 1
            print(f"allocated {torch.cuda.memory_allocated()}, live tensors {expected}")
        self.unexplained.look(graphs)
        if with_history:
            self.history.at_gate()
        self.moments += 1

    def leaked(self) -> int:
        return torch.cuda.memory_allocated() - self.base


def run(args: argparse.Namespace, consumer: Consumer | None) -> int:
    parts = args.parts
    # Everything that takes memory of its own, once: what others hold stays the same after it.
    warm = [torch.full((1000,), 1, dtype=torch.int32, device="cuda") for _ in range(3)]
    wrong_words = (warm[0] != 1).sum().item()
    streams = [torch.cuda.Stream() for _ in range(32)]  # torch makes its whole pool at once
    del warm, streams
    overhead = None
    if "graphs" in parts:
        overhead = Overhead()
        wrong_words += warm_up_graphs(args.threads * MAX_GRAPHS)
    if consumer is not None:
        wrong_words += consumer.warm_up()
    if wrong_words:
        print("the first tensors are wrong")
        return 1
    torch.cuda.synchronize()

    gate = threading.Barrier(args.threads + 1)
    deadline = time.monotonic() + args.minutes * 60
    plan = Plan(parts, deadline, gate, args.limit_mib * MIB, consumer)
    workers = [Worker(args.seed * 1000 + i, plan) for i in range(args.threads)]
    used = used_by_this_process if args.shared_card else used_on_device
    compared = Comparisons(workers, args.seed, overhead, used)
    for worker in workers:
        worker.start()
    try:
        while not plan.stop:
            gate.wait(timeout=120)
            compared.at_gate("history" in parts)
            plan.stop = time.monotonic() > deadline
            gate.wait(timeout=120)
    except threading.BrokenBarrierError:
        gate.abort()
    except BaseException:
        gate.abort()
        raise
    for worker in workers:
        worker.join(120)
    if "history" in parts:
        compared.history.off()
    return report(args, workers, compared)


def report(args: argparse.Namespace, workers: list[Worker], compared: Comparisons) -> int:
    done: Counter[str] = sum((w.done for w in workers), Counter())
    history, unexplained = compared.history, compared.unexplained
    needed = {
        "graphs": min(done["graphs"], done["replays"]),
        "pools": done["pool tensors"],
        "history": min(history.compared, history.switched),
        "ipc": done["shared"],
    }
    missing = [part for part in PARTS if part in args.parts and needed[part] == 0]
    wrong_words = sum(w.wrong for w in workers)
    leaked = compared.leaked()
    if unexplained.largest:
        print(f"at {unexplained.largest / MIB:+.2f} MiB unexplained: {unexplained.at_largest}")
    for worker in workers:
        if worker.error is not None:
            print("a thread failed:", *traceback.format_exception(worker.error), sep="\n")
        if worker.is_alive():
            print("a thread does not end")
    if missing:
        print(f"asked for and never done: {', '.join(missing)}")
    stats = torch.cuda.memory_stats()
    print(
        f"seed {args.seed}: {done['operations']} operations, "
        f"{done['words'] * 4 / 2**40:.2f} TiB checked, "
        f"{wrong_words} wrong words; "
        f"{done['graphs']} graphs captured ({done['graphs sharing a pool']} in another's pool), "
        f"{done['replays']} replays checked, "
        f"{done['outputs that outlived their graph']} outputs outlived their graph; "
        f"{done['pool tensors']} pool tensors, {done['pools dropped']} pools dropped "
        f"({done['pools dropped before their tensors']} before their tensors); "
        f"{done['shared']} tensors shared; history switched {history.switched} times, "
        f"{history.compared} snapshots compared, {history.wrong} wrong; "
        f"counters compared {compared.moments} times, "
        f"{compared.wrong} wrong; reserved against the driver: {unexplained.text()}; "
        f"left over {leaked} B; "
        f"peak live {stats['requested_bytes.all.peak'] / 2**30:.2f} GiB, "
        f"peak reserved {stats['reserved_bytes.all.peak'] / 2**30:.2f} GiB"
    )
    wrong = (
        wrong_words
        or compared.wrong
        or history.wrong
        or leaked
        or missing
        or abs(unexplained.largest) >= 1 * MIB + (OF_GRAPHS if "graphs" in args.parts else 0)
        or compared.moments == 0
        or any(w.error is not None or w.is_alive() for w in workers)
    )
    return 1 if wrong else 0


def main() -> int:
    args = arguments()
    if not args.torch:
        gpumemx.install_allocator()
    consumer = Consumer(args.torch) if "ipc" in args.parts else None
    try:
        return run(args, consumer)
    finally:
        if consumer is not None:
            consumer.end()


if __name__ == "__main__":
    sys.exit(main())
