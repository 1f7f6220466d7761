# SPDX-License-Identifier: BSD-3-Clause
"""Small random CUDA graphs whose every output word is known.

A graph reads a static input of one value v and leaves outputs of scale * v + offset, in 32 bits
without overflow. Its temporaries are freed within the capture.

Which memory a graph may overwrite decides when its outputs can be checked. The replays of graphs
that share a pool write over each other's temporaries, and an output of a later capture may stand
where an earlier one had temporaries. So a family of such graphs is replayed on one stream, and each
output is checked behind its replay on that stream. A graph alone in its pool is replayed on any
stream, and its outputs stay what they are after it is gone.
"""

from __future__ import annotations

import random
import threading
import time

import torch

# Held by whoever captures, replays or destroys a graph, waits for the device or shares memory:
# torch's generator keeps one set of graphs, and a flag that may refuse replays while anybody
# captures; CUDA refuses to wait for a device while a stream of it is captured; memory is not shared
# meanwhile. What matters needs no lock: others allocate, free and empty the cache during a capture.
capture_lock = threading.Lock()

VALUES = range(1, 1 << 20)
MAX_SCALE = 700  # times the largest value: below 2 ** 31
MAX_WORDS = 2 << 20


class Output:
    """A tensor that a graph writes: scale * value + offset everywhere."""

    def __init__(self, tensor: torch.Tensor, scale: int, offset: int) -> None:
        self.tensor = tensor
        self.scale = scale
        self.offset = offset

    def expected(self, value: int) -> int:
        return self.scale * value + self.offset


class Family:
    """Graphs of one pool. Once there are two, all replays are on the stream `home`."""

    def __init__(self, home: torch.cuda.Stream) -> None:
        self.home = home
        self.shared = False


class Graph:
    """A captured graph with its input and outputs. One thread's."""

    def __init__(
        self,
        r: random.Random,
        home: torch.cuda.Stream,
        side: torch.cuda.Stream | None,
        relative: Graph | None = None,
    ) -> None:
        """Capture on `home`, or in the pool of `relative` and on its home; `side` is forked to."""
        self.family = Family(home) if relative is None else relative.family
        home = self.family.home
        if side == home:
            side = None
        self.last = home  # where it was replayed last
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        words = r.randrange(1, r.choice((1000, MAX_WORDS // 4, MAX_WORDS)))
        self.outputs: list[Output] = []
        with torch.cuda.stream(home), capture_lock:
            self.static = torch.full((words,), 1, dtype=torch.int32, device="cuda")
            pool = None
            if relative is not None:
                assert relative.graph is not None
                if not self.family.shared:
                    home.wait_stream(relative.last)  # it may have been replayed elsewhere
                    relative.last = home
                self.family.shared = True
                pool = relative.graph.pool()
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._work(r, home, side)
            finally:
                self.graph.capture_end()

    def _work(
        self, r: random.Random, home: torch.cuda.Stream, side: torch.cuda.Stream | None
    ) -> None:
        scale, offset = 1, 0
        current = self.static
        for _ in range(r.randrange(1, 6)):
            if scale * 3 < MAX_SCALE // 3 and r.random() < 0.5:
                scale, offset, current = scale * 3, offset * 3, current * 3
            else:
                k = r.randrange(1, 1000)
                offset, current = offset + k, current + k  # frees what it was made of
            if r.random() < 0.2:
                time.sleep(0.001)  # others have time to allocate in the middle of the capture
        if side is not None:
            side.wait_stream(home)
            with torch.cuda.stream(side):
                seen = current * 3
                scale, offset = scale * 3, offset * 3
            current.record_stream(side)
            current = self.static
            # Must not get the memory that the side stream still reads.
            meanwhile = self.static * 0 - 9
            home.wait_stream(side)
            current = seen + 0
            seen.record_stream(home)
            del seen
            self.outputs.append(Output(meanwhile, 0, -9))
        self.outputs.append(Output(current, scale, offset))

    def tensors(self) -> list[torch.Tensor]:
        return [self.static, *(output.tensor for output in self.outputs)]

    def replay(self, where: torch.cuda.Stream, value: int) -> torch.cuda.Stream:
        """Replay for a value. Return the stream on which the outputs are ready; nothing waits."""
        assert self.graph is not None
        if self.family.shared:
            where = self.family.home
        if where != self.last:
            where.wait_stream(self.last)
        with torch.cuda.stream(where):
            if where != self.family.home:
                for tensor in self.tensors():
                    tensor.record_stream(where)
            self.static.fill_(value)
            with capture_lock:
                self.graph.replay()
        self.last = where
        return where

    def end(self, reset: bool) -> None:
        """Let go of the graph, which may still run, and of its tensors."""
        with capture_lock:
            if self.graph is not None and reset:
                self.graph.reset()
            self.graph = None
        self.outputs.clear()
        del self.static


class Overhead:
    """What torch itself keeps allocated for graphs, and a graph that lives as long as this.

    torch's generator has two small tensors on the device while any graph is registered with it, or
    two for each graph; it fills them on every stream that captures, so they must not come and go.
    """

    def __init__(self) -> None:
        self.static = torch.zeros(1, dtype=torch.int32, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self.keeper = self._capture(stream)
        before = torch.cuda.memory_allocated()
        second = self._capture(stream)
        self.per_graph = torch.cuda.memory_allocated() - before
        del second

    def _capture(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), capture_lock:
            graph.capture_begin(capture_error_mode="thread_local")
            self.static.add_(1)  # in place: a graph that allocates nothing
            graph.capture_end()
        return graph


def warm_up(count: int) -> int:
    """As many graphs at once as there will be, replayed and dropped. Return the wrong words.

    The driver keeps memory of its own for graphs, which is then there before anything is measured.
    """
    r = random.Random(1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    verdicts = []
    graphs: list[Graph] = []
    for i in range(count):
        graphs.append(Graph(r, streams[0], streams[1] if i % 2 else None))
        where = graphs[-1].replay(streams[i % 3], 5)
        with torch.cuda.stream(where):
            verdicts += [(o.tensor != o.expected(5)).sum() for o in graphs[-1].outputs]
    torch.cuda.synchronize()
    wrong = sum(int(v) for v in verdicts)
    for graph in graphs:
        graph.end(reset=True)
    torch.cuda.synchronize()
    return wrong
