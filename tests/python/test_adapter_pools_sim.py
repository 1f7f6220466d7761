# SPDX-License-Identifier: BSD-3-Clause
"""Private pools behind torch's own calls, over simulated devices.

What torch's graphs and memory pools call is called here: through torch._C where that needs no
device, else through test-only functions of the adapter's module.
"""

import ast
import textwrap

import pytest
from torch_tools import MIB, SIMULATED, output, program, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]

START = """
import contextlib
C = torch._C
P, Q = (0, 101), (0, 102)
third_party = adapter._SimThirdParty
create, users = adapter._sim_create_pool, adapter._sim_pool_use_count
release, empty_cache = C._cuda_releasePool, adapter._sim_empty_cache

@contextlib.contextmanager
def use(pool, device=0):  # torch.cuda.use_mem_pool
    C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        C._cuda_endAllocateToPool(device, pool)
        C._cuda_releasePool(device, pool)

def segments(pool=(0, 0)):
    return C._cuda_memorySnapshot(pool)["segments"]
def blocks(pool):
    live = []
    for s in segments(pool):
        at = s["address"]
        for b in s["blocks"]:
            if b["state"] == "active_allocated":
                live.append(at)
            at += b["size"]
    return sorted(live)
def reserved(device=0):
    return C._cuda_memoryStats(device)["reserved_bytes"]["all"]["current"]
def fails(call, *args, kind=RuntimeError):
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError("it did not fail")
"""


def run(text: str, **environment: str) -> list[object]:
    printed = simulated(START + textwrap.dedent(text), **environment)
    return [ast.literal_eval(line) for line in printed.splitlines()]


def test_an_allocation_goes_to_the_innermost_pool_of_its_thread() -> None:
    # pytorch/pytorch#161193 (nested), #152861 (threads)
    run(
        """
        import threading
        for pool in (P, Q): create(0, pool, None)
        with use(P):
            a = alloc(3 * MIB)
            with use(Q):
                b = alloc(3 * MIB)
                other = []
                t = threading.Thread(target=lambda: other.append(alloc(3 * MIB)))
                t.start(), t.join()
                elsewhere = alloc(3 * MIB, device=1)
            c = alloc(3 * MIB)
        d = alloc(3 * MIB)
        assert blocks(P) == sorted([a, c]), blocks(P)
        assert blocks(Q) == [b]
        in_pools = {tuple(s["segment_pool_id"]) for s in segments()}
        assert in_pools == {P, Q, (0, 0)}, in_pools
        outside = [s for s in segments() if tuple(s["segment_pool_id"]) == (0, 0)]
        assert sum(s["allocated_size"] for s in outside) == 9 * MIB
        """
    )


def test_threads_route_to_pools_of_their_own() -> None:
    run(
        """
        import threading
        errors = []
        def work(i):
            try:
                pool = (0, 200 + i)
                create(0, pool, None)
                for n in range(50):
                    with use(pool):
                        mine = [alloc(MIB * (1 + n % 3)) for _ in range(4)]
                        assert blocks(pool) == sorted(mine)
                    for a in mine: free(a)
                    assert blocks(pool) == []
                release(0, pool)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not errors, errors
        C._cuda_emptyCache()
        assert reserved() == 0
        """
    )


def test_the_users_of_a_pool_are_counted() -> None:
    assert run(
        """
        create(0, P, None)
        counts = [users(0, P)]
        with use(P):
            counts.append(users(0, P))
        counts.append(users(0, P))
        create(0, P, None)
        counts.append(users(0, P))
        release(0, P), release(0, P)
        print(counts)
        print(repr(fails(release, 0, P)))
        print(repr(fails(users, 0, Q)))
        print(repr(fails(C._cuda_endAllocateToPool, 0, P)))
        """
    ) == [
        [1, 2, 1, 2],
        "releasePool: there is no memory pool (0, 101) in use on device 0",
        "there is no memory pool (0, 102) on device 0",
        "endAllocateToPool: not currently recording to mempool_id (0, 101)",
    ]


def test_a_pool_is_routed_to_once_at_a_time() -> None:
    run(
        """
        with use(P):
            error = fails(C._cuda_beginAllocateCurrentThreadToPool, 0, P)
            assert "already recording to mempool_id" in error, error
            assert users(0, P) == 1
        alloc(MIB)
        assert blocks(P) == []
        """
    )


def test_what_each_pool_reserves_is_told() -> None:
    run(
        """
        create(0, P, None)
        with use(P): a = alloc(64 * MIB)
        stats = C._cuda_memoryStats(0)
        if "reserved_bytes_by_private_pools" in stats:  # from torch 2.13 on
            of = lambda: C._cuda_memoryStats(0)["reserved_bytes_by_private_pools"][P]["all"]
            assert of()["current"] == of()["peak"] == 64 * MIB, of()
            free(a)
            release(0, P)
            C._cuda_emptyCache()
            assert (of()["current"], of()["peak"]) == (0, 64 * MIB), of()
        """
    )


def test_memory_of_a_pool_is_its_own_until_it_is_released() -> None:
    run(
        """
        with use(P):
            first = alloc(60 * MIB)
            free(first)
            assert alloc(60 * MIB) == first
            create(0, P, None)  # what a graph would hold
        free(first)
        C._cuda_emptyCache(), empty_cache(P)
        assert reserved() == 60 * MIB
        other = alloc(60 * MIB)
        assert reserved() == 120 * MIB
        release(0, P)
        empty_cache(P)
        assert reserved() == 60 * MIB
        assert segments(P) == []
        free(other)
        # The id may be used again, as that of torch.cuda.graph_pool_handle() is.
        with use(P):
            again = alloc(60 * MIB)
            assert blocks(P) == [again]
        """
    )


def test_a_block_may_outlive_its_pool() -> None:
    # pytorch/pytorch#146431
    run(
        """
        with use(P):
            block = alloc(30 * MIB)
        assert blocks(P) == [block]
        empty_cache(P)
        assert reserved() >= 30 * MIB
        free(block)
        C._cuda_emptyCache()
        assert reserved() == 0
        """
    )


def test_many_temporary_pools_leave_nothing() -> None:
    # pytorch/pytorch#167745
    run(
        """
        for i in range(300):
            pool = (0, 1000 + i)
            create(0, pool, None)
            with use(pool):
                a = alloc(20 * MIB)
            adapter._sim_set_use_on_oom(0, pool, False)
            release(0, pool)
            free(a)
            empty_cache(pool)
            assert reserved() == 0
        """
    )


def test_the_cache_may_be_emptied_inside_a_pool() -> None:
    run(
        """
        free(alloc(100 * MIB))
        with use(P):
            free(alloc(50 * MIB))
            C._cuda_emptyCache()
            kept = reserved()
            assert 50 * MIB <= kept < 64 * MIB, kept  # whole pieces of what was idle
            empty_cache(P)
            assert reserved() == kept
        """
    )


# --- captures


def test_a_capture_goes_to_its_pool_and_is_not_disturbed() -> None:
    run(
        """
        import threading
        main, side, else_ = (adapter._sim_new_stream(0) for _ in range(3))
        on = lambda size, stream: adapter._sim_alloc_on(0, size, stream)
        old = on(30 * MIB, main)
        G = (7, 0)
        adapter._sim_begin_capture(0, G, [main, side])
        a, b, c = on(20 * MIB, main), on(MIB, side), on(20 * MIB, else_)
        assert blocks(G) == sorted([a, b])
        free(old)           # memory from outside, freed in the capture
        free(a)
        assert on(20 * MIB, main) == a
        assert adapter._sim_record_stream(0, b, main)
        free(b)             # still in use by another stream of the capture
        assert on(MIB, side) != b
        stop = []
        def storm():        # others ask for events, wait and give back meanwhile
            for i in range(300):
                free(on((1 + i % 40) * MIB, else_))
                if i % 50 == 0: C._cuda_emptyCache()
        t = threading.Thread(target=storm); t.start(); t.join()
        assert adapter._sim_end_capture(0, G, [main, side])
        assert on(20 * MIB, main) not in (a, b)
        assert users(0, G) == 1   # until the graph is reset
        C._cuda_emptyCache()
        kept = [s for s in segments() if tuple(s["segment_pool_id"]) == G]
        assert sum(s["total_size"] for s in kept) >= 20 * MIB
        """
    )


def test_graphs_share_a_pool_and_the_last_one_lets_go() -> None:
    run(
        """
        stream = adapter._sim_new_stream(0)
        G = (7, 0)
        for _ in range(2):
            adapter._sim_begin_capture(0, G, [stream])
            free(adapter._sim_alloc_on(0, 40 * MIB, stream))
            assert adapter._sim_end_capture(0, G, [stream])
        assert users(0, G) == 2
        assert reserved() == 40 * MIB       # the second used what the first had left
        release(0, G)
        empty_cache(G)
        assert reserved() == 40 * MIB
        release(0, G)
        empty_cache(G)
        assert reserved() == 0
        """
    )


def test_a_graph_may_use_several_pools() -> None:
    run(
        """
        stream = adapter._sim_new_stream(0)
        on = lambda size: adapter._sim_alloc_on(0, size, stream)
        G = (7, 0)
        create(0, P, None)
        adapter._sim_begin_capture(0, G, [stream])
        a = on(20 * MIB)
        with use(P):
            b = on(20 * MIB)
        c = on(20 * MIB)
        assert adapter._sim_end_capture(0, G, [stream])
        assert blocks(G) == sorted([a, c])
        assert blocks(P) == [b]
        """
    )


def test_out_of_memory_in_a_capture_leaves_it_valid() -> None:
    # pytorch/pytorch#159594: nothing is waited for, no plain memory is freed
    run(
        """
        stream = adapter._sim_new_stream(0)
        G = (7, 0)
        free(alloc(6 * GIB))
        adapter._sim_begin_capture(0, G, [stream])
        error = fails(adapter._sim_alloc_on, 0, 7 * GIB + GIB // 2 * 3, stream)
        assert error.startswith("CUDA out of memory. Tried to allocate 8.50 GiB"), error
        adapter._sim_alloc_on(0, GIB, stream)
        assert adapter._sim_end_capture(0, G, [stream])
        """
    )


def test_marks_of_captures_need_not_match() -> None:
    run(
        """
        adapter._sim_mark_capture(0, False)
        adapter._sim_mark_capture(0, True)
        adapter._sim_mark_capture(0, False)
        adapter._sim_mark_capture(0, False)
        free(alloc(MIB))
        """
    )


# --- a third party's allocator, no_split, use_on_oom


def test_a_third_party_makes_and_frees_the_memory_of_its_pool() -> None:
    # The steps of torch's own test of MemPool with an allocator.
    run(
        """
        owner = third_party()
        create(0, P, owner)
        with use(P):
            out = [alloc(MIB)]
            assert len(segments(P)) == 1
        with use(P):
            out.append(alloc(MIB))
            assert len(segments(P)) == 1
            out.append(alloc(MIB))
            assert len(segments(P)) == 2
        assert owner.asked == [2 * MIB, 2 * MIB]
        assert not any(s["is_expandable"] for s in segments(P))
        assert reserved() == 4 * MIB
        survivor = out.pop(0)
        for a in out: free(a)
        assert owner.freed == 0
        release(0, P)
        empty_cache(P)
        assert owner.freed == 1
        free(survivor)
        C._cuda_emptyCache()
        assert owner.freed == 2 and reserved() == 0
        """
    )


def test_what_a_third_party_raises_reaches_the_caller() -> None:
    run(
        """
        owner = third_party()
        create(0, P, owner)
        with use(P):
            owner.raises = True
            assert "the third party raises" in fails(alloc, 5 * MIB)
            owner.raises, owner.refuses = False, True
            error = fails(alloc, 5 * MIB, kind=torch.OutOfMemoryError)
            assert error.startswith("CUDA out of memory. Tried to allocate 5.00 MiB"), error
            owner.refuses = False
            alloc(5 * MIB)
        assert owner.asked == [20 * MIB]
        """
    )


def test_an_allocator_belongs_to_a_pool_from_its_begin() -> None:
    run(
        """
        create(0, P, None)
        assert "can't be changed" in fails(create, 0, P, third_party())
        """
    )


def test_without_splitting_each_block_is_a_device_allocation() -> None:
    run(
        """
        create(0, P, None)
        adapter._sim_set_no_split(0, P)
        with use(P):
            a, b = alloc(MIB), alloc(3 * MIB)
        found = {s["address"]: s["total_size"] for s in segments(P)}
        assert found == {a: 2 * MIB, b: 4 * MIB}, found
        assert not any(s["is_expandable"] for s in segments(P))
        """
    )


def test_a_setting_makes_all_pools_ordinary_device_memory() -> None:
    run(
        """
        with use(P):
            alloc(3 * MIB)
            assert not any(s["is_expandable"] for s in segments(P))
        alloc(3 * MIB)
        assert any(s["is_expandable"] for s in segments())
        assert [s["value"] for s in adapter.settings() if s["key"] == "pool_mode"] == ["plain"]
        """,
        PYTORCH_ALLOC_CONF="gpumemx_pool_mode:plain",
    )


def test_a_pool_for_the_case_helps_out_of_memory() -> None:
    # The steps of torch's own test with a limited memory.
    run(
        """
        leave, take = third_party(), third_party()
        create(0, P, leave), create(0, Q, take)
        adapter._sim_set_use_on_oom(0, Q, True)
        C._cuda_setMemoryFraction(80 * MIB / (8 * GIB), 0)
        with use(P): a = alloc(40 * MIB)
        with use(Q): b = alloc(40 * MIB)
        fails(alloc, 40 * MIB, kind=torch.OutOfMemoryError)
        free(a), free(b)
        c = alloc(30 * MIB)
        assert c == b
        fails(alloc, 30 * MIB, kind=torch.OutOfMemoryError)
        free(c)
        with use(Q): assert alloc(20 * MIB) == b
        """
    )


# --- checkpoints (torch.compile's trees of graphs)


def test_a_checkpoint_restores_what_was_live() -> None:
    run(
        """
        def storage_at(address, size):  # as the trees make them: no owner yet
            return C._construct_storage_from_data_pointer(address, torch.device("cuda", 0), size)
        with use(P):
            create(0, P, None)
            a, b = alloc(20 * MIB), alloc(MIB)
            state = C._cuda_getCheckpointState(0, P)
            assert C._cuda_checkPoolLiveAllocations(0, P, {a, b})
            free(b)
            assert not C._cuda_checkPoolLiveAllocations(0, P, {a, b})
            assert C._cuda_checkPoolLiveAllocations(0, P, {a})
        # A replay has made both tensors again: their storages are known, and get their owner back.
        free(a)
        live = [storage_at(a, 20 * MIB), storage_at(b, MIB)]
        C._cuda_setCheckpointPoolState(0, state, [], [s._cdata for s in live])
        assert C._cuda_checkPoolLiveAllocations(0, P, {a, b})
        assert all(C._has_Standard_Deleter(s._cdata) for s in live)
        with use(P):
            c = alloc(MIB)
            assert c not in (a, b)
            free(c)
        del live[0]
        assert C._cuda_checkPoolLiveAllocations(0, P, {b})
        live.clear()
        assert blocks(P) == []
        # Nobody has the blocks of a checkpoint unless somebody names them.
        C._cuda_setCheckpointPoolState(0, state, [], [])
        assert blocks(P) == sorted([a, b])
        free(a), free(b)
        """
    )


def test_a_checkpoint_is_of_one_pool_while_it_lives() -> None:
    run(
        """
        with use(P):
            alloc(MIB)
            state = C._cuda_getCheckpointState(0, P)
            assert "no checkpoint" in fails(C._cuda_setCheckpointPoolState, 1, state, [], [])
        assert "not in use" in fails(C._cuda_setCheckpointPoolState, 0, state, [], [])
        assert "not in use" in fails(C._cuda_getCheckpointState, 0, P)
        with use(P):
            error = fails(C._cuda_setCheckpointPoolState, 0, state, [], [])
            assert "released meanwhile" in error, error
        """
    )


# --- ends


def test_pools_may_die_with_the_process() -> None:
    run(
        """
        import atexit, os, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        owner = third_party()
        create(0, P, owner)
        with use(P): alloc(30 * MIB)
        child = os.fork()
        if child == 0:
            release(0, P), empty_cache(P)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        def last():
            adapter._sim_set_use_on_oom(0, P, False)
            release(0, P)
            empty_cache(P)
        atexit.register(last)
        """
    )


def test_allocations_outside_of_pools_ask_no_filter() -> None:
    assert run(
        f"""
        with use(P, device=1):
            a = alloc({MIB})
        print(blocks(P))
        """
    ) == [[]]


# What NCCL does with a pool, in the words of torch: trackers are attached when the first pool is
# registered, then the pool's segments are read and registered; later SEGMENT_ALLOC registers one
# more and SEGMENT_FREE takes one away. Deregistering the pool reads its segments again.
NCCL = """
tracker = adapter._SimTracker()
known = {}
def follow(pool=P):
    for e in tracker.take():
        if tuple(e["pool_id"]) != pool: continue
        if e["action"] == "segment_alloc": known[e["addr"]] = e["size"]
        if e["action"] == "segment_free": del known[e["addr"]]  # one that NCCL has
def register(pool=P):
    known.update({s["address"]: s["total_size"] for s in segments(pool)})
def mapped(pool=P):
    return {s["address"]: s["total_size"] for s in segments(pool)}
create(0, P, None)
"""


def test_what_nccl_has_registered_of_a_pool_is_what_the_pool_has() -> None:
    run(
        NCCL
        + """
with use(P):
    before = [alloc(size) for size in (100 * MIB, 3 * MIB, 100, 40 * MIB)]
first = mapped()
register()
assert known == first and known
with use(P):
    more = [alloc(size, stream=stream) for size in (200 * MIB, 5 * MIB, 300) for stream in (1, 2)]
for block in before[:2] + more[:2]:
    free(block)
with use(P):
    again = [alloc(size) for size in (90 * MIB, 2 * MIB)]
others = [alloc(size) for size in (300 * MIB, 64 * MIB)]
follow()
# Nothing has grown, joined or moved, and all of it is known.
assert known == mapped() and first.items() <= known.items(), (known, mapped())
inside = lambda a: any(begin <= a < begin + size for begin, size in known.items())
assert all(inside(a) for a in before[2:] + more[2:] + again)
"""
    )


def test_nccl_is_told_before_memory_that_it_has_registered_goes_elsewhere() -> None:
    """The pool dies without being deregistered first, as torch allows."""
    run(
        NCCL
        + """
with use(P):
    held = [alloc(100 * MIB), alloc(7 * MIB)]
register()
with use(P):
    held.append(alloc(64 * MIB))
follow()
assert len(known) >= 2
for block in held: free(block)
release(0, P)
assert known  # what is registered is still there
moved = alloc(6 * GIB), alloc(1900 * MIB)  # all of a device of 8 GiB: nothing can stay
follow()
assert known == {}, known
"""
    )


def test_a_pool_that_nobody_can_register_stays_mapped() -> None:
    run(
        """
create(0, P, None)
with use(P):
    alloc(100 * MIB)
segments(P)
with use(P):
    alloc(200 * MIB)
assert all(s["is_expandable"] for s in segments(P))
"""
    )


HOOKS = ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK")
ENVIRONMENT = """
import ctypes
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(repr([getenv(name) for name in {!r}]))
"""


@pytest.mark.parametrize("name", HOOKS)
def test_memory_that_moves_is_not_registered_as_it_comes(name: str) -> None:
    done = program(SIMULATED + ENVIRONMENT.format([name.encode()]), **{name: "1"})
    assert (done.returncode, done.stdout) == (0, "[b'0']\n"), done.stderr
    assert f"gpumemx: {name} is ignored" in done.stderr
    assert "mode:plain" in done.stderr


def test_memory_that_does_not_move_may_be_registered_as_it_comes() -> None:
    plain = SIMULATED.replace('install("",', 'install("mode:plain",')
    asked = ENVIRONMENT.format([HOOKS[0].encode()])
    assert output(plain + asked, **{HOOKS[0]: "1"}) == "[b'1']\n"
    assert output(SIMULATED + asked, **{HOOKS[0]: "0"}) == "[b'0']\n"
