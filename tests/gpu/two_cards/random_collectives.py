# SPDX-License-Identifier: BSD-3-Clause
"""Random collectives of two ranks, every element checked, while both allocate, free and harvest.

Both ranks draw the same collectives from the seed: which, how long, on which of several streams
(each with a communicator of its own), waited for at once or later. What a rank puts in follows from
the collective's number and the rank, so each computes what has to come out and compares every word,
on the device, sometimes on another stream. Meanwhile each rank, by its own seed, allocates tensors
of all sizes, fills them, compares them when it frees them, and now and then empties the cache; a
second thread does the same.

python random_collectives.py [--count N] [--seconds S] [--seed S] [--allocator A] [--device cpu]

Prints a line. Exit status 1 when an element is wrong, when not all collectives were done, or when
gpumemx has moved no memory in a rank, so that nothing was tried.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from two_ranks import (
    FEW_BLOCKS,
    RANKS,
    add_arguments,
    handles_moved,
    join,
    results_of,
    run_ranks,
    tell,
)

MIB = 1 << 20
STREAMS = 3  # beside the default one
ODD = -1640531527  # 2**32 / golden ratio, as int32: neighbours get far values
ROUND = 100  # collectives between two looks at the clock


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=300, help="stop then (300)")
    parser.add_argument("--no-thread", action="store_true", help="without the second thread")
    parser.add_argument("--still", action="store_true", help="no memory need have moved")
    add_sizes(parser)
    return parser.parse_args()


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest-mib", type=int, default=64, help="of a rank's part (64)")
    parser.add_argument("--live-mib", type=int, default=2048, help="most, by rank and kind (2048)")


def log_uniform(draw: random.Random, most: int) -> int:
    return max(1, int(math.exp(draw.uniform(0, math.log(most)))))


# --- in a rank


class Streams:
    """The default stream and others, or none on the CPU, with a counter for each."""

    def __init__(self, device) -> None:
        import torch

        self.torch = torch
        self.count = 1 + STREAMS
        side = [torch.cuda.Stream() for _ in range(STREAMS)] if device.type == "cuda" else []
        self.all = [torch.cuda.current_stream(), *side] if side else [None] * self.count
        self.wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in self.all]

    def on(self, index: int):
        stream = self.all[index]
        return contextlib.nullcontext() if stream is None else self.torch.cuda.stream(stream)

    def hand_over(self, tensor, origin: int, to: int) -> None:
        """Let stream `to` use a tensor of stream `origin`."""
        if origin == to or self.all[0] is None:
            return
        self.all[to].wait_stream(self.all[origin])
        tensor.record_stream(self.all[to])

    def compare(self, got, expected, index: int) -> None:
        """Count the elements that differ, on this stream. REQUIRES: it is the current one."""
        self.wrong[index].add_((got != expected).sum())


@dataclass
class Open:
    """A collective whose result was not looked at yet."""

    out: object
    expected: Callable
    work: object
    stream: int

    def bytes(self) -> int:
        return self.out.numel() * self.out.element_size()


class Collectives:
    """Makes them, all on this thread, and checks them later."""

    def __init__(self, args, device, streams: Streams) -> None:
        import torch

        self.torch, self.device, self.rank, self.streams = torch, device, args.rank, streams
        self.longest = args.longest_mib * MIB // 4
        self.live_limit = args.live_mib * MIB
        self.plan = random.Random(args.seed)
        self.own = random.Random(args.seed * RANKS + args.rank + 1)
        self.base = torch.arange(RANKS * self.longest, dtype=torch.int32, device=device)
        self.open: list[Open] = []
        self.elements = 0
        self.groups = [dist().group.WORLD, *(dist().new_group() for _ in range(STREAMS))]
        self.connect()

    def connect(self) -> None:
        """Let each communicator connect alone: that may wait for the device."""
        one = self.torch.zeros(1, device=self.device)
        for group in self.groups:
            dist().all_reduce(one, group=group)
            for sender in range(RANKS):
                move = dist().send if sender == self.rank else dist().recv
                move(one, 1 - self.rank, group=group)
        one.item()

    def words(self, key: int, rank: int, count: int):
        seed = (key * 7919 + rank * 104729) % (1 << 31)
        return (self.base[:count] * ODD).add_(seed)

    def empty(self, count: int):
        return self.torch.empty(count, dtype=self.torch.int32, device=self.device)

    def make(self, key: int) -> None:
        plan = self.plan
        kind = plan.choice(KINDS)
        stream, count = plan.randrange(self.streams.count), log_uniform(plan, self.longest)
        later, root = plan.random() < 0.5, plan.randrange(RANKS)
        with self.streams.on(stream):
            out, expected, work = kind(self, key, count, root, later, self.groups[stream])
        self.open.append(Open(out, expected, work, stream))
        while self.open and (
            sum(o.bytes() for o in self.open) > self.live_limit or self.own.random() < 0.45
        ):
            self.check(self.open.pop(self.own.randrange(len(self.open))))

    def check(self, made: Open) -> None:
        if made.work is not None:
            with self.streams.on(made.stream):
                made.work.wait()
        where = made.stream if self.own.random() < 0.7 else self.own.randrange(self.streams.count)
        self.streams.hand_over(made.out, made.stream, where)
        with self.streams.on(where):
            self.streams.compare(made.out, made.expected(), where)
        self.elements += made.out.numel()

    # --- the kinds: what comes out, how to compute what should, and what to wait for

    def all_reduce(self, key, count, root, later, group):
        out = self.words(key, self.rank, count)
        work = dist().all_reduce(out, group=group, async_op=later)
        return out, lambda: self.words(key, 0, count) + self.words(key, 1, count), work

    def all_gather(self, key, count, root, later, group):
        out = self.empty(RANKS * count)
        mine = self.words(key, self.rank, count)
        work = dist().all_gather_into_tensor(out, mine, group=group, async_op=later)
        parts = lambda: [self.words(key, r, count) for r in range(RANKS)]  # noqa: E731
        return out, lambda: self.torch.cat(parts()), work

    def reduce_scatter(self, key, count, root, later, group):
        out = self.empty(count)
        mine = self.words(key, self.rank, RANKS * count)
        work = dist().reduce_scatter_tensor(out, mine, group=group, async_op=later)

        def expected():
            both = self.words(key, 0, RANKS * count) + self.words(key, 1, RANKS * count)
            return both[self.rank * count : (self.rank + 1) * count]

        return out, expected, work

    def all_to_all(self, key, count, root, later, group):
        out = self.empty(RANKS * count)
        mine = self.words(key, self.rank, RANKS * count)
        work = dist().all_to_all_single(out, mine, group=group, async_op=later)

        def expected():
            all_words = [self.words(key, r, RANKS * count) for r in range(RANKS)]
            part = slice(self.rank * count, (self.rank + 1) * count)
            return self.torch.cat([words[part] for words in all_words])

        return out, expected, work

    def broadcast(self, key, count, root, later, group):
        out = self.words(key, root, count) if root == self.rank else self.empty(count)
        work = dist().broadcast(out, root, group=group, async_op=later)
        return out, lambda: self.words(key, root, count), work

    def send(self, key, count, root, later, group):
        """From `root` to the other; not batched. The sender checks that its words are untouched."""
        sends, other = root == self.rank, 1 - self.rank
        out = self.words(key, root, count) if sends else self.empty(count)
        if later:
            work = (dist().isend if sends else dist().irecv)(out, other, group=group)
        else:
            work = None
            (dist().send if sends else dist().recv)(out, other, group=group)
        return out, lambda: self.words(key, root, count), work

    def finish(self) -> None:
        while self.open:
            self.check(self.open.pop())


KINDS = (
    Collectives.all_reduce,
    Collectives.all_gather,
    Collectives.reduce_scatter,
    Collectives.all_to_all,
    Collectives.broadcast,
    Collectives.send,
    Collectives.send,
)


def dist():
    import torch.distributed

    return torch.distributed


class Churn:
    """Tensors of this rank alone, full of one word each, compared when they are freed."""

    def __init__(self, seed: int, device, streams: Streams, limit: int) -> None:
        import torch

        self.torch, self.device, self.streams, self.limit = torch, device, streams, limit
        self.draw = random.Random(seed)
        self.held: list[tuple[object, int, int]] = []
        self.bytes = self.elements = 0

    def step(self) -> None:
        if self.held and (self.bytes > self.limit or self.draw.random() < 0.48):
            return self.drop(self.draw.randrange(len(self.held)))
        stream = self.draw.randrange(self.streams.count)
        word, size = self.draw.getrandbits(31), log_uniform(self.draw, self.limit // 8)
        with self.streams.on(stream):
            count = max(1, size // 4)
            tensor = self.torch.full((count,), word, dtype=self.torch.int32, device=self.device)
        self.held.append((tensor, word, stream))
        self.bytes += 4 * count
        return None

    def drop(self, index: int) -> None:
        tensor, word, stream = self.held.pop(index)
        with self.streams.on(stream):
            self.streams.compare(tensor, word, stream)
        self.elements += tensor.numel()
        self.bytes -= 4 * tensor.numel()

    def empty(self) -> None:
        while self.held:
            self.drop(-1)


class ChurnThread(threading.Thread):
    """The same on a second thread, with streams of its own."""

    def __init__(self, churn: Churn) -> None:
        super().__init__(daemon=True)
        self.churn, self.stop, self.error = churn, threading.Event(), None

    def run(self) -> None:
        try:
            if self.churn.device.type == "cuda":
                self.churn.torch.cuda.set_device(self.churn.device)
            while not self.stop.wait(0.001):
                self.churn.step()
            self.churn.empty()
        except BaseException as error:
            self.error = error


def any_rank(torch, said: bool, control) -> bool:
    """Tell both ranks whether one of them says so; over a communicator of the hosts."""
    flag = torch.tensor([int(said)])
    dist().all_reduce(flag, op=dist().ReduceOp.MAX, group=control)
    return bool(flag.item())


def be_a_rank(args: argparse.Namespace) -> dict:
    device = join(args)
    import torch

    control = dist().new_group(backend="gloo")
    streams = Streams(device)
    work = Collectives(args, device, streams)
    mine = Churn(1000 + args.seed * RANKS + args.rank, device, streams, args.live_mib * MIB)
    # Comparisons of two threads would meet in one counter.
    other_streams = Streams(device)
    other = Churn(2000 + args.seed * RANKS + args.rank, device, other_streams, args.live_mib * MIB)
    if device.type == "cuda":
        torch.cuda.synchronize()  # counters and words were made on the default stream
    thread = ChurnThread(other)
    if not args.no_thread:
        thread.start()
    begin, done = time.monotonic(), 0
    while done < args.count:
        for _ in range(min(ROUND, args.count - done)):
            work.make(done)
            done += 1
            for _ in range(2):
                mine.step()
            if device.type == "cuda" and work.own.random() < 1 / 400:
                torch.cuda.empty_cache()
        late = time.monotonic() - begin > args.seconds or thread.error is not None
        if any_rank(torch, late, control):
            break
    work.finish()
    mine.empty()
    thread.stop.set()
    if thread.is_alive():
        thread.join()
    if thread.error is not None:
        raise thread.error
    if device.type == "cuda":
        torch.cuda.synchronize()
    result = {
        "done": done,
        "elements": work.elements + mine.elements + other.elements,
        "wrong": int(sum(int(w) for w in streams.wrong + other_streams.wrong)),
        "moved": handles_moved(device),
        "seconds": time.monotonic() - begin,
    }
    dist().barrier(group=control)
    dist().destroy_process_group()
    return result


# --- in the parent


def main() -> int:
    args = arguments()
    if args.rank is not None:
        return tell(be_a_rank(args))
    results = results_of(run_ranks(__file__, sys.argv[1:], limit=args.seconds + 120, **FEW_BLOCKS))
    if len(results) < RANKS:
        return 1
    done, wrong = min(r["done"] for r in results), sum(r["wrong"] for r in results)
    moved = [r["moved"] for r in results]
    told = "" if None in moved else f", handles moved {' and '.join(f'{m:,}' for m in moved)}"
    print(
        f"{done:,} collectives in {max(r['seconds'] for r in results):.1f} s on {args.allocator} "
        f"(seed {args.seed}), {sum(r['elements'] for r in results):,} elements checked, "
        f"{wrong} wrong{told}"
    )
    nothing_moved = not args.still and 0 in moved
    if nothing_moved:
        print("a rank has moved no memory: nothing was tried")
    return int(wrong > 0 or done < args.count or nothing_moved)


if __name__ == "__main__":
    sys.exit(main())
