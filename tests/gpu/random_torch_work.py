# SPDX-License-Identifier: BSD-3-Clause
"""Random torch work on gpumemx, with every byte checked, for as long as asked.

Several threads allocate tensors of random sizes on random streams, fill them, check them later
(sometimes on other streams, with record_stream), free them in any order and empty the cache.
Checked: the contents of every tensor when it dies, torch's counters against the sum over live
tensors, and reserved memory against what the driver says is gone.

python random_torch_work.py [--minutes M] [--seed S] [--threads T] [--torch]

Exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time

# Kernels that are loaded at their first use take device memory then, 2 MiB at a time.
os.environ["CUDA_MODULE_LOADING"] = "EAGER"

import gpumemx
import torch
from gpumemx import _adapter

MIB = 1 << 20
ROUND = 512


class Worker(threading.Thread):
    """One thread's tensors. Stops at the gate, so that counters can be compared meanwhile."""

    def __init__(self, seed: int, deadline: float, gate: threading.Barrier, limit: int) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.deadline = deadline
        self.gate = gate
        self.limit = limit
        self.live: list[tuple[torch.Tensor, int, torch.cuda.Stream]] = []
        self.verdicts: list[tuple[torch.Tensor, torch.cuda.Stream]] = []
        self.bytes = 0
        self.operations = 0
        self.checked_words = 0
        self.wrong = 0
        self.error: BaseException | None = None

    def size(self) -> int:
        r = self.random
        kind = r.random()
        if kind < 0.5:
            return r.randrange(4, 1 * MIB)
        if kind < 0.8:
            return r.choice([1, 2, 4, 8, 16, 20, 33, 64]) * MIB
        if kind < 0.98:
            return r.randrange(1 * MIB, 96 * MIB)
        return r.randrange(96 * MIB, 400 * MIB)

    def allocate(self) -> None:
        words = max(1, self.size() // 4)
        stream = self.random.choice(self.streams)
        value = self.random.randrange(1, 1 << 30)
        with torch.cuda.stream(stream):
            tensor = torch.full((words,), value, dtype=torch.int32, device="cuda")
        self.live.append((tensor, value, stream))
        self.bytes += tensor.untyped_storage().nbytes()

    def free(self) -> None:
        r = self.random
        order = r.random()
        index = -1 if order < 0.3 else 0 if order < 0.5 else r.randrange(len(self.live))
        tensor, value, stream = self.live.pop(index)
        self.bytes -= tensor.untyped_storage().nbytes()
        self.checked_words += tensor.numel()
        where = stream
        if r.random() < 0.4:
            where = r.choice(self.streams)
            where.wait_stream(stream)
            if where is not stream:
                tensor.record_stream(where)
        with torch.cuda.stream(where):
            self.verdicts.append(((tensor != value).sum(), where))

    def settle(self) -> None:
        torch.cuda.synchronize()
        self.wrong += sum(int(v) for v, _ in self.verdicts)
        self.verdicts.clear()

    def step(self) -> None:
        r = self.random
        if self.live and (self.bytes > self.limit or r.random() < 0.45):
            self.free()
        else:
            self.allocate()
        if r.random() < 0.0005:
            torch.cuda.empty_cache()
        if r.random() < 0.001:
            r.choice(self.streams).synchronize()
        if len(self.verdicts) > 300:
            self.settle()
        self.operations += 1

    def run(self) -> None:
        try:
            torch.cuda.set_device(0)
            self.streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(4)]
            while time.monotonic() < self.deadline:
                for _ in range(self.random.randrange(50, 4000)):
                    self.step()
                self.settle()
                self.gate.wait()  # everybody stands still ...
                self.gate.wait()  # ... until the main thread has compared the counters
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self.error = error
            self.gate.abort()
        finally:
            while self.live:
                self.free()
            self.settle()


def rounded(tensor: torch.Tensor) -> int:
    return (tensor.untyped_storage().nbytes() + ROUND - 1) // ROUND * ROUND


def gone() -> int:
    """What the device has given to others, in bytes; what is on its way back counts as ours."""
    before = None
    while True:  # the background thread may be giving memory back just now
        free, total = torch.cuda.mem_get_info()
        ours = _adapter.installed()
        returning = 0 if ours is None else ours.paths(0)["returning_bytes"]
        others = total - free - torch.cuda.memory_reserved() - returning
        if others == before:
            return others
        before = others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--limit-mib", type=int, default=3000, help="live memory a thread")
    parser.add_argument("--torch", action="store_true", help="torch's own allocator, to compare")
    args = parser.parse_args()

    if not args.torch:
        gpumemx.install_allocator()
    # Everything that takes memory of its own, once: what others hold stays the same after it.
    warm = [torch.full((1000,), 1, dtype=torch.int32, device="cuda") for _ in range(3)]
    wrong_words = (warm[0] != 1).sum().item()
    streams = [torch.cuda.Stream() for _ in range(32)]  # torch makes its whole pool at once
    del warm, streams
    if wrong_words:
        print("the first tensor is wrong")
        return 1
    torch.cuda.synchronize()
    base_allocated = torch.cuda.memory_allocated()
    others = gone()

    gate = threading.Barrier(args.threads + 1)
    deadline = time.monotonic() + args.minutes * 60
    workers = [
        Worker(args.seed * 1000 + i, deadline, gate, args.limit_mib * MIB)
        for i in range(args.threads)
    ]
    for worker in workers:
        worker.start()
    moments, counters_wrong, most_unexplained = 0, 0, 0
    try:
        while time.monotonic() < deadline:
            gate.wait(timeout=120)
            expected = base_allocated + sum(rounded(t) for w in workers for t, _, _ in w.live)
            if torch.cuda.memory_allocated() != expected:
                counters_wrong += 1
                print(f"allocated {torch.cuda.memory_allocated()}, live tensors {expected}")
            unexplained = abs(gone() - others)
            most_unexplained = max(most_unexplained, unexplained)
            moments += 1
            gate.wait(timeout=120)
    except threading.BrokenBarrierError:
        pass
    gate.abort()
    for worker in workers:
        worker.join(120)
    stats = torch.cuda.memory_stats()
    leaked = torch.cuda.memory_allocated() - base_allocated
    print(
        f"seed {args.seed}: {sum(w.operations for w in workers)} operations, "
        f"{sum(w.checked_words for w in workers) * 4 / 2**40:.2f} TiB checked, "
        f"{sum(w.wrong for w in workers)} wrong words; counters compared {moments} times, "
        f"{counters_wrong} wrong; reserved against the driver: at most "
        f"{most_unexplained / MIB:.2f} MiB unexplained; left over {leaked} B; "
        f"peak live {stats['requested_bytes.all.peak'] / 2**30:.2f} GiB, "
        f"peak reserved {stats['reserved_bytes.all.peak'] / 2**30:.2f} GiB"
    )
    for worker in workers:
        if worker.error is not None:
            print(f"a thread failed: {type(worker.error).__name__}: {worker.error}")
    wrong = (
        sum(w.wrong for w in workers)
        or counters_wrong
        or leaked
        or most_unexplained >= 1 * MIB
        or moments == 0
        or any(w.error is not None for w in workers)
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
