# SPDX-License-Identifier: BSD-3-Clause
"""CUDA graphs and memory pools of torch on gpumemx, on a device, with every content checked.

Needs a GPU, torch and the adapter, and a process of its own (the allocator is installed before CUDA
starts):

    python -m pytest tests/gpu/test_graphs_and_pools.py

With GPUMEMX_TEST_NATIVE=1 the same runs on torch's own allocator; what only gpumemx does is
skipped.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
NATIVE = os.environ.get("GPUMEMX_TEST_NATIVE") == "1"


def why_not() -> str:
    """Return why these tests can't run here, or ''."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if NATIVE:
        return "" if torch.cuda.is_available() else "there is no CUDA device"
    try:
        import gpumemx
    except ImportError as error:
        return f"gpumemx cannot be imported: {error}"
    try:
        gpumemx.install_allocator()
    except gpumemx.InstallError as error:
        return f"gpumemx cannot be torch's allocator here: {error}"
    return "" if torch.cuda.is_available() else "there is no CUDA device"


reason = why_not()
if reason and os.environ.get("GPUMEMX_REQUIRE_GPU") == "1":
    raise RuntimeError(f"GPUMEMX_REQUIRE_GPU=1, but {reason}")
if reason:
    pytest.skip(reason, allow_module_level=True)

import torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    # torch's compiler warns of its own use of things that go away.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
only_gpumemx = pytest.mark.skipif(NATIVE, reason="torch's own allocator does not do this")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Give every test an empty cache, and check that it leaves no block behind."""

    def settle() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that cuBLAS was used on
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    before = settle()
    yield
    assert settle() - before <= 64 * MIB  # torch's compiler and generators may keep a little


def ints(n: int, value: int) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.int32, device="cuda")


def check(tensor: torch.Tensor, value: int) -> None:
    wrong = int((tensor != value).sum())
    assert wrong == 0, f"{wrong} of {tensor.numel()} words are not {value}"


def churn(rounds: int = 30, limit: int = 192) -> None:
    """Allocate, fill and free memory of many sizes, so that idle memory moves about."""
    live: list[torch.Tensor] = []
    for i in range(rounds):
        size = 1 + (i * 37) % limit
        live.append(torch.full((size * MIB,), 0x5A, dtype=torch.uint8, device="cuda"))
        if len(live) > 4:
            live.pop((i * 5) % len(live))


def capture(
    work: Callable[[], Any], pool: Any = None, mode: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
        out = work()
    return graph, out


def segments_of(pool: Any) -> list[dict[str, Any]]:
    return torch.cuda.memory_snapshot(pool)


def live_in(pool: Any) -> set[int]:
    found = set()
    for segment in segments_of(pool):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found.add(address)
            address += block["size"]
    return found


def program(text: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- graphs


def test_a_graph_computes_the_same_at_every_replay() -> None:
    static = ints(4 * MIB, 1)

    def work() -> torch.Tensor:
        doubled = static * 2
        plus = doubled + 5
        del doubled
        return plus * 3

    graph, out = capture(work)
    for value in (7, 100, -3):
        static.fill_(value)
        graph.replay()
        check(out, (value * 2 + 5) * 3)


def test_a_graph_replays_after_all_else_was_freed_and_moved() -> None:
    static = ints(8 * MIB, 3)
    graph, out = capture(lambda: ((static + 1) * 2).clone() + 0)
    pool = graph.pool()
    kept = []
    for i in range(12):
        churn()
        torch.cuda.empty_cache()
        kept.append(ints((20 + i) * MIB // 4, i))
        static.fill_(i)
        graph.replay()
        check(out, (i + 1) * 2)
    for i, tensor in enumerate(kept):  # nor has the graph written anywhere else
        check(tensor, i)
    assert segments_of(pool)


def test_the_memory_of_a_graph_goes_when_the_graph_and_its_tensors_do() -> None:
    before = torch.cuda.memory_reserved()
    graph, out = capture(lambda: ints(64 * MIB, 4) + 1)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before >= 256 * MIB  # the out; the rest may be replayed
    graph.replay()
    check(out, 5)
    pool = graph.pool()
    del graph
    torch.cuda.empty_cache()
    check(out, 5)  # it outlives the graph
    assert out.data_ptr() in live_in(pool)
    del out
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 32 * MIB


def test_graphs_share_a_pool() -> None:
    static = ints(4 * MIB, 2)
    first, a = capture(lambda: static * 10)
    second, b = capture(lambda a=a: a + 1, pool=first.pool())
    third, c = capture(lambda a=a, b=b: b * 2 + a, pool=first.pool())
    assert {a.data_ptr(), b.data_ptr(), c.data_ptr()} <= live_in(first.pool())
    for value in (3, 4):
        static.fill_(value)
        for graph in (first, second, third):
            graph.replay()
        check(c, (value * 10 + 1) * 2 + value * 10)
    pool = first.pool()
    del first, a
    torch.cuda.empty_cache()
    churn()
    third.replay()  # its pool is there as long as one graph is
    del second, third, b, c
    torch.cuda.empty_cache()
    assert live_in(pool) == set()


def test_a_pool_handle_may_be_used_again_after_its_graphs() -> None:
    handle = torch.cuda.graph_pool_handle()
    for value in range(4):
        graph, out = capture(lambda v=value: ints(MIB, v) + 1, pool=handle)
        graph.replay()
        check(out, value + 1)
        del out
        graph.reset()
        torch.cuda.empty_cache()


def test_a_graph_uses_several_pools() -> None:
    inner, deeper = torch.cuda.MemPool(), torch.cuda.MemPool()
    static = ints(2 * MIB, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a = static + 1
        with torch.cuda.use_mem_pool(inner):
            b = a * 2
            with torch.cuda.use_mem_pool(deeper):
                c = b + 3
            d = c * 2
        e = d + a
    assert b.data_ptr() in live_in(inner.id)
    assert d.data_ptr() in live_in(inner.id)
    assert c.data_ptr() in live_in(deeper.id)
    assert {a.data_ptr(), e.data_ptr()} <= live_in(graph.pool())
    for value in (5, 9):
        static.fill_(value)
        churn(10)
        graph.replay()
        check(e, ((value + 1) * 2 + 3) * 2 + value + 1)


def test_a_replay_on_a_stream_without_memory_is_waited_for() -> None:
    size = 16 * MIB
    result = ints(size, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        temporary = ints(size, 77)
        torch.cuda._sleep(100_000_000)  # some 60 ms
        result.copy_(temporary)
        del temporary
    stream = torch.cuda.Stream()  # nothing was ever allocated here
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
    del graph  # running still; its memory must not move on
    others = [torch.full((size,), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    check(result, 77)
    for tensor in others:
        check(tensor, -1)


def test_record_stream_in_a_capture() -> None:
    static = ints(4 * MIB, 1)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        temporary = static + 1
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            seen = temporary * 3  # while the main stream goes on
        temporary.record_stream(side)
        del temporary
        overwriting = [static * 0 - 9 for _ in range(4)]  # must not get that memory
        main.wait_stream(side)
        out = seen + 0
        seen.record_stream(main)
        del seen
    for value in (10, 20):
        static.fill_(value)
        graph.replay()
        check(out, (value + 1) * 3)
        for tensor in overwriting:
            check(tensor, -9)


def test_memory_freed_in_a_capture_that_others_still_use() -> None:
    side = torch.cuda.Stream()
    before = ints(8 * MIB, 6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with torch.cuda.stream(side):  # not of the capture: this runs now
            torch.cuda._sleep(100_000_000)
            late = before * 2
        before.record_stream(side)
        del before
        out = ints(8 * MIB, 1)
    overwriting = [ints(8 * MIB, -1) for _ in range(4)]
    graph.replay()
    torch.cuda.synchronize()
    check(late, 12)
    check(out, 1)
    for tensor in overwriting:
        check(tensor, -1)


def test_other_threads_do_not_end_a_capture() -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def storm(seed: int, stream: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(stream):
                i = seed
                while not stop.is_set():
                    i += 1
                    tensors = [
                        torch.empty((i * 13 + k) % 90 * MIB + 512, dtype=torch.uint8, device="cuda")
                        for k in range(3)
                    ]
                    tensors[0].record_stream(torch.cuda.default_stream())
                    del tensors
        except BaseException as error:
            errors.append(error)

    # Making a stream is not permitted while others capture.
    streams = [torch.cuda.Stream() for _ in range(3)]
    threads = [threading.Thread(target=storm, args=(100 * i, s)) for i, s in enumerate(streams)]
    for thread in threads:
        thread.start()
    static = ints(MIB, 0)
    try:
        for value in range(30):
            graph, out = capture(lambda: (static + 1) * 2, mode="global")
            static.fill_(value)
            graph.replay()
            check(out, (value + 1) * 2)
            del graph, out
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def test_out_of_memory_in_a_capture_leaves_all_usable() -> None:
    free, _ = torch.cuda.mem_get_info()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = ints(MIB, 8) + 1
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free * 2, dtype=torch.uint8, device="cuda")
    graph.replay()
    check(kept, 9)
    again, out = capture(lambda: ints(MIB, 2) * 2)
    again.replay()
    check(out, 4)


# In a process of its own: torch's generators stay in the state of a capture that failed.
@only_gpumemx
def test_an_invalid_capture_does_not_stop_later_ones() -> None:
    program(
        """
        import gpumemx
        import torch
        gpumemx.install_allocator()
        # torch keeps the route of its pinned memory after a capture that failed, so each has a pool
        # of its own here.
        static = torch.ones(1 << 20, device="cuda")
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
                    out = static + 1
                    torch.cuda.synchronize()  # not permitted in a capture
                raise SystemExit("the capture should have failed")
            except RuntimeError:
                pass
            torch.cuda.set_stream(torch.cuda.default_stream())
            del graph
            out = None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = static + 4
        graph.replay()
        assert bool((out == 5).all())
        # No capture is under way any more: what is freed elsewhere is waited for.
        size = torch.cuda.mem_get_info()[0] // 4 * 3
        big = torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(100_000_000)
        del big
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(size, dtype=torch.uint8, device="cuda")
        """
    )


def test_graphed_callables_train_as_eager_ones_do() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
        ).cuda()

    data = [torch.randn(64, 256, device="cuda") for _ in range(4)]

    def train(net: torch.nn.Module, call: Any) -> list[float]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for x in data * 3:
            loss = (call(x) - x).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    eager, graphed = model(), model()
    call = torch.cuda.make_graphed_callables(graphed, (data[0].clone().requires_grad_(False),))
    expected, got = train(eager, eager), train(graphed, call)
    assert got == pytest.approx(expected, rel=1e-4)


# --- memory pools


def test_pools_nest_and_the_innermost_wins() -> None:
    outer, inner = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer):
        a = ints(MIB, 1)
        with torch.cuda.use_mem_pool(inner):
            b = ints(MIB, 2)
        c = ints(MIB, 3)
    d = ints(MIB, 4)
    assert live_in(outer.id) == {a.data_ptr(), c.data_ptr()}
    assert live_in(inner.id) == {b.data_ptr()}
    for tensor, value in ((a, 1), (b, 2), (c, 3), (d, 4)):
        check(tensor, value)


def test_a_pool_is_for_the_thread_that_uses_it() -> None:
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            pool = torch.cuda.MemPool()
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(20):
                    with torch.cuda.use_mem_pool(pool):
                        tensors = [ints((1 + n % 5) * MIB, i) for _ in range(3)]
                    outside = ints(MIB, -i)
                    assert live_in(pool.id) == {t.data_ptr() for t in tensors}
                    for tensor in tensors:
                        check(tensor, i)
                    check(outside, -i)
                    del tensors, tensor, outside
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_temporary_pools_come_and_go() -> None:
    before = torch.cuda.memory_reserved()
    for i in range(50):
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            tensor = ints(4 * MIB, i)
        check(tensor, i)
    del tensor
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_a_pool_gives_its_memory_back_when_it_dies() -> None:
    pool = torch.cuda.MemPool()
    free_before, _ = torch.cuda.mem_get_info()
    with torch.cuda.use_mem_pool(pool):
        tensor = ints(256 * MIB, 1)
    check(tensor, 1)
    del tensor
    torch.cuda.empty_cache()  # the pool is in use: it keeps what it has
    free_during, _ = torch.cuda.mem_get_info()
    assert free_before - free_during >= 900 * MIB
    del pool
    free_after, _ = torch.cuda.mem_get_info()
    assert free_after - free_during >= 900 * MIB


def test_a_pool_may_die_before_its_blocks() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [ints(8 * MIB, i) for i in range(4)]
    number = pool.id
    del pool
    churn()
    torch.cuda.empty_cache()
    for i, tensor in enumerate(tensors):
        check(tensor, i)
    assert live_in(number) == {t.data_ptr() for t in tensors}
    del tensors, tensor
    torch.cuda.empty_cache()
    assert segments_of(number) == []


def test_the_cache_may_be_emptied_inside_a_pool() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = ints(MIB, 1)
        torch.cuda.empty_cache()
        b = ints(MIB, 2)
        del a
        torch.cuda.empty_cache()
    check(b, 2)


def test_pools_count_their_users() -> None:
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
    assert pool.use_count() == 1
    graph, _ = capture(lambda: ints(MIB, 1), pool=pool.id)
    assert pool.use_count() == 2
    graph.reset()
    assert pool.use_count() == 1


# --- a third party's allocator

SOURCE = """
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
int made = 0, freed = 0;
static void *driver(const char *name) {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW);
  return lib ? dlsym(lib, name) : 0;
}
void *third_party_malloc(size_t size, int device, void *stream) {
  int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))driver("cuMemAlloc_v2");
  uint64_t at = 0;
  if (!allocate || allocate(&at, size) != 0) return 0;
  ++made;
  return (void *)at;
}
void third_party_free(void *at, size_t size, int device, void *stream) {
  int (*give)(uint64_t) = (int (*)(uint64_t))driver("cuMemFree_v2");
  if (give) give((uint64_t)at);
  ++freed;
}
"""


class ThirdParty:
    """An allocator in a library of its own, and its counters."""

    def __init__(self, library: Path) -> None:
        self.pluggable = torch.cuda.memory.CUDAPluggableAllocator(
            str(library), "third_party_malloc", "third_party_free"
        )
        self.functions = ctypes.CDLL(str(library))

    def allocator(self) -> Any:
        return self.pluggable.allocator()

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.functions, name).value


@pytest.fixture
def third_party(tmp_path: Path) -> ThirdParty:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler for the third party's allocator")
    source, library = tmp_path / "third_party.c", tmp_path / "third_party.so"
    source.write_text(SOURCE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True
    )
    return ThirdParty(library)


def test_a_third_party_makes_and_frees_the_memory_of_its_pool(third_party: ThirdParty) -> None:
    pool = torch.cuda.MemPool(third_party.allocator())
    with torch.cuda.use_mem_pool(pool):
        a = torch.full((MIB,), 1, dtype=torch.uint8, device="cuda")
        b = torch.full((MIB,), 2, dtype=torch.uint8, device="cuda")
        assert third_party.count("made") == 1  # both in one segment of 2 MiB
        c = ints(16 * MIB, 3)
    made = third_party.count("made")
    assert made == 2
    assert len(pool.snapshot()) == 2
    outside = ints(16 * MIB, 4)
    assert third_party.count("made") == made
    for tensor, value in ((a, 1), (b, 2), (c, 3), (outside, 4)):
        check(tensor, value)
    del b, c
    torch.cuda.empty_cache()
    assert third_party.count("freed") == 0
    del pool
    assert third_party.count("freed") == 1
    check(a, 1)
    del a, tensor
    torch.cuda.empty_cache()
    assert third_party.count("freed") == made


def test_a_graph_in_a_third_partys_memory(third_party: ThirdParty) -> None:
    pool = torch.cuda.MemPool(third_party.allocator())
    static = ints(4 * MIB, 1)
    # Relaxed: the third party asks the device in the middle of the capture.
    graph, out = capture(lambda: (static + 1) * 3, pool=pool.id, mode="relaxed")
    assert third_party.count("made") >= 1
    for value in (4, 5):
        static.fill_(value)
        churn(10)
        graph.replay()
        check(out, (value + 1) * 3)
    del graph, out, pool
    torch.cuda.empty_cache()
    assert third_party.count("freed") == third_party.count("made")


def test_a_pool_for_the_case_helps_out_of_memory(third_party: ThirdParty) -> None:
    pool_leave = torch.cuda.MemPool(third_party.allocator())
    pool_use = torch.cuda.MemPool(third_party.allocator(), use_on_oom=True)
    _, total = torch.cuda.mem_get_info()
    fraction = torch.cuda.get_per_process_memory_fraction()
    # A little more than 80 MiB, since a fraction of the device is not exact to the byte.
    allowed = torch.cuda.memory_reserved() + 81 * MIB
    torch.cuda.set_per_process_memory_fraction(allowed / total)

    def block(mib: int) -> torch.Tensor:
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    try:
        with torch.cuda.use_mem_pool(pool_leave):
            a = block(40)
        with torch.cuda.use_mem_pool(pool_use):
            b = block(40)
        address = b.data_ptr()
        with pytest.raises(torch.OutOfMemoryError):
            block(40)
        del a, b
        c = block(30)
        assert c.data_ptr() == address
        with pytest.raises(torch.OutOfMemoryError):
            block(30)
        del c
        with torch.cuda.use_mem_pool(pool_use):
            d = block(20)
        assert d.data_ptr() == address
        del d
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction)


# --- memory for cudaIpcGetMemHandle() and registration


def ipc_handle_error(tensor: torch.Tensor) -> int:
    handle = (ctypes.c_char * 64)()
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.cuIpcGetMemHandle(handle, ctypes.c_uint64(tensor.data_ptr()))


def test_without_splitting_each_block_is_a_device_allocation() -> None:
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        a, b = ints(MIB // 4, 1), ints(MIB, 2)
    assert len(pool.snapshot()) == 2
    assert {s["address"] for s in pool.snapshot()} == {a.data_ptr(), b.data_ptr()}
    check(a, 1)
    check(b, 2)
    assert ipc_handle_error(a) == 0
    assert ipc_handle_error(b) == 0


@only_gpumemx
def test_a_setting_gives_graph_pools_ordinary_device_memory() -> None:
    text = """
        import ctypes
        import gpumemx
        import torch
        gpumemx.install_allocator()
        def error(tensor):
            handle = (ctypes.c_char * 64)()
            address = ctypes.c_uint64(tensor.data_ptr())
            return ctypes.CDLL("libcuda.so.1").cuIpcGetMemHandle(handle, address)
        static = torch.ones(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = static * 2
        static.fill_(3)
        graph.replay()
        assert bool((out == 6).all())
        assert error(static) != 0
        print(error(out))
        """
    assert program(text, GPUMEMX_CONF="pool_mode:plain").strip() == "0"
    assert program(text, GPUMEMX_CONF="").strip() != "0"


# --- trees of graphs


def test_trees_of_graphs_restore_the_state_of_their_pool() -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("torch.compile needs a C compiler here")
    pytest.importorskip("triton", reason="torch.compile needs triton for CUDA")
    import torch._dynamo
    import torch._inductor.config as config
    from torch._inductor import cudagraph_trees

    def foo(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * x * x).relu(), x + 1

    def bar(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).cos() * 2

    def baz(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x + y).sin(), torch.cat([x, y])

    torch._dynamo.reset()
    compiled = [torch.compile(f, mode="reduce-overhead") for f in (foo, bar, baz)]
    paths = [(1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2, 1)]

    def walk(functions: list[Any], x: torch.Tensor, path: tuple[int, ...]) -> list[torch.Tensor]:
        a, b = functions[0](x)
        results = [a, b]
        for step in path:
            out = functions[step](a, b)
            outs = out if isinstance(out, tuple) else (out,)
            results += outs
            a = outs[0]
        return results

    with config.patch({"triton.slow_path_cudagraph_asserts": True}):
        for round_ in range(5):
            for path in paths:
                torch.compiler.cudagraph_mark_step_begin()
                x = torch.full((512, 513), 0.1 * (round_ + 1), device="cuda")
                got = [r.clone() for r in walk(compiled, x, path)]
                expected = walk([foo, bar, baz], x, path)
                for g, e in zip(got, expected, strict=True):
                    torch.testing.assert_close(g, e)
                del got, expected
                churn(4)
        manager = cudagraph_trees.get_manager(
            torch.cuda.current_device(), create_if_none_exists=False
        )
        assert manager is not None, "nothing was captured"
        assert manager.debug_checkpointing_counter >= 1
    del manager, compiled, x
    torch._dynamo.reset()
    gc.collect()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
