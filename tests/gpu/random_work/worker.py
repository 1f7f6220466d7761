# SPDX-License-Identifier: BSD-3-Clause
"""One thread's random work: tensors, and at will graphs, pools and tensors for another process."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from . import sharing
from .graphs import VALUES, Graph, capture_lock

MIB = 1 << 20
MAX_GRAPHS = 4  # a worker
MAX_POOLS = 2


@dataclass
class Plan:
    """What all workers have in common."""

    parts: frozenset[str]
    deadline: float
    gate: threading.Barrier
    limit: int
    consumer: sharing.Consumer | None = None
    stop: bool = False  # written by the main thread while all stand at the gate


@dataclass(eq=False)
class Pool:
    """A MemPool, which dies before its tensors or, when closing, with the last of them."""

    pool: torch.cuda.MemPool | None = field(default_factory=torch.cuda.MemPool)
    tensors: int = 0
    closing: bool = False


@dataclass(eq=False)
class Held:
    """A tensor that is full of one value, written on a stream."""

    tensor: torch.Tensor
    value: int
    stream: torch.cuda.Stream
    pool: Pool | None = None
    ordinary: bool = True  # from neither a pool nor a graph


class Worker(threading.Thread):
    """One thread's tensors. Stops at the gate, so that counters can be compared meanwhile."""

    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.plan = plan
        self.live: list[Held] = []
        self.graphs: list[Graph] = []
        self.pools: list[Pool] = []
        self.verdicts: list[torch.Tensor] = []
        self.bytes = 0
        self.done: Counter[str] = Counter()
        self.wrong = 0
        self.error: BaseException | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that this worker holds, for the main thread while it stands at the gate."""
        for held in self.live:
            yield held.tensor
        for graph in self.graphs:
            yield from graph.tensors()

    # --- tensors

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

    def hold(self, held: Held) -> None:
        self.live.append(held)
        self.bytes += held.tensor.untyped_storage().nbytes()

    def allocate(self) -> None:
        words = max(1, self.size() // 4)
        stream = self.random.choice(self.streams)
        value = self.random.randrange(1, 1 << 30)
        pool = self.open_pool()
        if pool is None or pool.pool is None:
            with torch.cuda.stream(stream):
                tensor = torch.full((words,), value, dtype=torch.int32, device="cuda")
            self.hold(Held(tensor, value, stream))
            return
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool.pool):
            tensor = torch.full((words,), value, dtype=torch.int32, device="cuda")
        pool.tensors += 1
        self.done["pool tensors"] += 1
        self.hold(Held(tensor, value, stream, pool, ordinary=False))

    def verify(self, tensor: torch.Tensor, value: int, where: torch.cuda.Stream) -> None:
        """Count wrong words on the device; settle() asks for the number."""
        with torch.cuda.stream(where):
            self.verdicts.append((tensor != value).sum())
        self.done["words"] += tensor.numel()

    def free(self, index: int | None = None) -> None:
        r = self.random
        if index is None:
            order = r.random()
            index = -1 if order < 0.3 else 0 if order < 0.5 else r.randrange(len(self.live))
        held = self.live.pop(index)
        self.bytes -= held.tensor.untyped_storage().nbytes()
        where = held.stream
        if r.random() < 0.4:
            where = r.choice(self.streams)
            where.wait_stream(held.stream)
            if where is not held.stream:
                held.tensor.record_stream(where)
        self.verify(held.tensor, held.value, where)
        pool = held.pool
        del held  # before its pool, which may go with it
        if pool is not None:
            pool.tensors -= 1
            self.end_pool_if_over(pool)

    # --- pools

    def open_pool(self) -> Pool | None:
        """The pool for the next tensor, or none; now and then one is made or dropped."""
        if "pools" not in self.plan.parts:
            return None
        r = self.random
        if len(self.pools) < MAX_POOLS and r.random() < 0.02:
            self.pools.append(Pool())
        usable = [p for p in self.pools if not p.closing]
        if usable and r.random() < 0.01:
            self.drop_pool(usable.pop(r.randrange(len(usable))))
        return r.choice(usable) if usable and r.random() < 0.2 else None

    def drop_pool(self, pool: Pool) -> None:
        if pool.tensors == 0 or self.random.random() < 0.5:
            self.done["pools dropped before their tensors"] += pool.tensors > 0
            self.end_pool(pool)
        else:
            pool.closing = True

    def end_pool_if_over(self, pool: Pool) -> None:
        if pool.closing and pool.tensors == 0 and pool.pool is not None:
            self.end_pool(pool)

    def end_pool(self, pool: Pool) -> None:
        pool.pool = None
        self.pools.remove(pool)
        self.done["pools dropped"] += 1

    # --- graphs

    def graph_step(self) -> None:
        r = self.random
        kind = r.random()
        if not self.graphs or (kind < 0.1 and len(self.graphs) < MAX_GRAPHS):
            home, side = r.sample(self.streams[1:], 2)  # the default stream can't be captured
            relative = r.choice(self.graphs) if self.graphs and r.random() < 0.4 else None
            self.graphs.append(Graph(r, home, side if r.random() < 0.4 else None, relative))
            self.done["graphs"] += 1
            self.done["graphs sharing a pool"] += relative is not None
        elif kind < 0.2:
            self.drop_graph()
        else:
            self.replay(r.choice(self.graphs))

    def replay(self, graph: Graph) -> None:
        value = self.random.choice(VALUES)
        where = graph.replay(self.random.choice(self.streams), value)
        for output in graph.outputs:
            self.verify(output.tensor, output.expected(value), where)
        self.done["replays"] += 1

    def drop_graph(self) -> None:
        r = self.random
        graph = self.graphs.pop(r.randrange(len(self.graphs)))
        if not graph.family.shared and r.random() < 0.5:
            # Its outputs live on, and the graph goes while it may still run.
            value = r.choice(VALUES)
            where = graph.replay(r.choice(self.streams), value)
            for output in graph.outputs:
                self.hold(Held(output.tensor, output.expected(value), where, ordinary=False))
            self.done["outputs that outlived their graph"] += len(graph.outputs)
        graph.end(reset=r.random() < 0.5)

    # --- sharing

    def share(self, consumer: sharing.Consumer) -> None:
        index = self.random.randrange(len(self.live))
        held = self.live[index]
        if not held.ordinary or held.tensor.untyped_storage().nbytes() > sharing.LARGEST:
            return
        self.wrong += consumer.check(held.tensor, held.value, held.stream)
        self.done["shared"] += 1
        del held
        self.free(index)

    # --- the whole

    def settle(self) -> None:
        with capture_lock:
            torch.cuda.synchronize()
            self.wrong += sum(int(v) for v in self.verdicts)
        self.verdicts.clear()

    def step(self) -> None:
        r = self.random
        if self.live and (self.bytes > self.plan.limit or r.random() < 0.45):
            self.free()
        else:
            self.allocate()
        if r.random() < 0.0005:
            torch.cuda.empty_cache()
        if r.random() < 0.001:
            with capture_lock:
                r.choice(self.streams).synchronize()
        if "graphs" in self.plan.parts and r.random() < 0.02:
            self.graph_step()
        if self.plan.consumer is not None and self.live and r.random() < 1 / 150:
            self.share(self.plan.consumer)
        if len(self.verdicts) > 300:
            self.settle()
        self.done["operations"] += 1

    def end(self) -> None:
        """Drop and check all, in whichever order of graphs, pools and tensors."""
        while self.graphs:
            self.drop_graph()
        for pool in [p for p in self.pools if not p.closing]:
            self.drop_pool(pool)
        while self.live:
            self.free()
        self.settle()

    def run(self) -> None:
        plan = self.plan
        try:
            torch.cuda.set_device(0)
            self.streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(4)]
            while not plan.stop:
                for _ in range(self.random.randrange(50, 4000)):
                    if time.monotonic() > plan.deadline:
                        break
                    self.step()
                self.settle()
                plan.gate.wait()  # everybody stands still ...
                plan.gate.wait()  # ... until the main thread has compared the counters
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self.error = error
            plan.gate.abort()
        finally:
            self.end()
