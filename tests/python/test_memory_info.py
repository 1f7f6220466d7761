# SPDX-License-Identifier: BSD-3-Clause
"""memory_info() by cause: the parts add up to the byte, and what is not known is never a number.

The devices are simulated, and NVML and the addresses of the process are made up.
"""

import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import gpumemx
import pytest
from fake_nvml import FakeCard, FakeNvml, put_in_place
from gpumemx import _memory, _nvml
from torch_tools import GIB, MIB, output, simulated

TESTS = str(Path(__file__).parent)
with_adapter = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]

START = f"""
import os, sys
sys.path.insert(0, {TESTS!r})
from fake_nvml import FakeCard, NVMLError, put_in_place
from gpumemx import _nccl, _nvml, _outside
OWN = os.getpid()

def card(i=0, own=None, others=()):
    mine = [] if own is None else [(OWN, own)]
    return FakeCard(f"GPU-{{i}}", total=8 * GIB, processes=[*mine, *others])

class Other(_outside.Driver):  # what the process has outside of the allocator, by device
    def __init__(self, ranges, contexts=(0, 1), unknown=""):
        self.found, self.contexts = _outside.Found(ranges, unknown), contexts
    def has_context(self, device):
        return device in self.contexts

def outside(ranges=None, **more):
    driver = Other(ranges or {{}}, **more)
    _outside.Driver.if_started = classmethod(lambda cls: driver)
    _outside.find = lambda driver, skip: driver.found

def nccl(size=0, unknown=""):  # what NCCL says that it holds
    _nccl.held = lambda index, driver: _nccl.Held(size, unknown)

def take(size, device=0):  # of the device, and not through the allocator
    adapter._sim_take(device, size)

def adds_up(i):
    assert i.total == i.reserved + i.others + i.free, i
    assert i.reserved == i.live + i.pending + i.cached + i.held, i
    parts = i.earlier + (i.context or 0) + (i.nccl or 0) + (i.outside or 0) + i.in_processes
    assert i.others == parts + i.unexplained, i
    assert i.held == sum(i.held_by.values()), i
    assert i.waiting == sum(i.waiting_on.values()) <= i.cached, i
    assert i.pending == sum(i.pending_on.values()), i
    assert i.in_pools == sum(p.reserved for p in i.pools), i
    assert 0 <= i.rounding <= i.live and (i.workspaces or 0) <= i.live, i
    assert i.releasable <= i.releasable_by_waiting <= i.reserved, i
    return i

def info(device=0):
    return adds_up(gpumemx.memory_info(device))
"""


def run(text: str, **environment: str) -> str:
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0,1")
    return simulated(START + textwrap.dedent(text), **environment)


class TestParts:
    pytestmark = with_adapter

    def test_every_byte_has_its_cause(self) -> None:
        run(
            """
            a = alloc(100 * MIB)
            take(900 * MIB)
            machine = put_in_place(card(0, own=518 * MIB + 128 * MIB + 100 * MIB,
                                        others=[(4711, 200 * MIB), (4712, 30 * MIB)]), card(1))
            machine.names[4711] = "/usr/bin/python3 train.py"
            outside({0: [(1 << 40, 100 * MIB), (1 << 41, 28 * MIB)]})
            i = info()
            assert (i.reserved, i.others, i.free) == (100 * MIB, 900 * MIB, 8 * GIB - 1000 * MIB), i
            assert i.context == 518 * MIB
            assert i.outside == 128 * MIB
            assert [(p.pid, p.bytes) for p in i.processes] == [(4711, 200 * MIB), (4712, 30 * MIB)]
            assert i.processes[0].name == "python3"
            # What nobody tells of.
            assert i.unexplained == 900 * MIB - 518 * MIB - 128 * MIB - 230 * MIB == 24 * MIB
            assert i.unknown == {}
            text = gpumemx.memory_summary(0)
            assert "outside       128.00 MiB    1.6 %  by this process, not by torch" in text, text
            assert "  unexplained    24.00 MiB    0.3 %  see the docs" in text, text
            """
        )

    def test_a_plant_moves_its_own_line_and_no_other(self) -> None:
        run(
            """
            a = alloc(100 * MIB)
            take(700 * MIB)
            mine, others = 618 * MIB, [(4711, 182 * MIB - 8 * MIB)]
            def now(own, others, found):
                put_in_place(card(0, own, others), card(1))
                outside({0: found})
                return info().to_dict()
            def moved(before, after):
                return {k: after[k] - before[k] for k in
                        ("live", "cached", "context", "unexplained", "nccl", "outside") if
                        after[k] != before[k]}
            before = now(mine, others, [])
            take(512 * MIB)
            here = now(mine + 512 * MIB, others, [(1 << 40, 512 * MIB)])
            assert moved(before, here) == {"outside": 512 * MIB}
            assert here["processes"] == before["processes"]
            there = now(mine, [(4711, others[0][1] + 512 * MIB)], [])
            assert moved(before, there) == {}
            assert there["processes"][0]["bytes"] - before["processes"][0]["bytes"] == 512 * MIB
            """
        )

    def test_random_work_adds_up(self) -> None:
        run(
            """
            import random
            pick, held, pools = random.Random(5), [], []
            C = torch._C
            outside()
            s = adapter._sim_new_stream(0)
            adapter._sim_create_pool(0, (0, 7), None)
            for step in range(400):
                choice = pick.random()
                if held and choice < 0.4:
                    a = held.pop(pick.randrange(len(held)))
                    if pick.random() < 0.3: adapter._sim_record_stream(0, a, s)
                    free(a)
                elif choice < 0.5:
                    C._cuda_beginAllocateCurrentThreadToPool(0, (0, 7))
                    held.append(alloc(pick.choice((600, 3 * MIB, 21 * MIB))))
                    C._cuda_endAllocateToPool(0, (0, 7))
                    C._cuda_releasePool(0, (0, 7))
                else:
                    held.append(alloc(pick.choice((300, 7000, 2 * MIB, 30 * MIB + 5)),
                                      stream=pick.choice((1, 3))))
                i = info()
                assert i.live - i.rounding == i.requested
            assert len(i.pools) == 1 and i.pools[0].id == (0, 7) and i.pools[0].in_use
            """
        )

    def test_workspaces_of_cublas_are_told_and_dropped(self) -> None:
        run(
            """
            a = alloc(10 * MIB)
            assert info().workspaces == 0
            assert adapter._sim_add_workspace(0, 8 * MIB, 1)
            assert adapter._sim_add_workspace(1, 32 * MIB, 1)
            i = info()
            assert (i.live, i.workspaces) == (18 * MIB, 8 * MIB), i
            assert info(1).workspaces == 32 * MIB
            text = gpumemx.memory_summary(0)
            assert "    workspaces      8.00 MiB    0.1 %  of cuBLAS, kept by torch" in text, text
            r = gpumemx.clear_cache(workspaces=True, wait=True)
            assert r.workspaces == 40 * MIB and r.released == r.predicted == 40 * MIB, r
            assert [(d.device, d.workspaces) for d in r.devices] == [(0, 8 * MIB), (1, 32 * MIB)]
            assert (info().workspaces, info().live) == (0, 10 * MIB)
            assert gpumemx.clear_cache("cuda:1", workspaces=True).workspaces == 0
            """
        )

    def test_who_is_waited_for(self) -> None:
        run(
            """
            s, t = adapter._sim_new_stream(0), adapter._sim_new_stream(0)
            a, b, c = alloc(64 * MIB), adapter._sim_alloc_on(0, 32 * MIB, t), alloc(300)
            adapter._sim_stop_work(0)
            adapter._sim_record_stream(0, a, s)
            adapter._sim_launch(0, t)
            adapter._sim_launch(0, s)
            free(a), free(b)
            i = info()
            assert i.pending_on == {s: 64 * MIB} and i.pending == 64 * MIB, i
            assert i.waiting_on == {t: 32 * MIB}, i
            assert (i.releasable, i.releasable_by_waiting) == (0, 96 * MIB), i
            assert i.held_by == {"live": 2 * MIB - 512}, i
            text = gpumemx.memory_summary(0)
            assert f"    stream         64.00 MiB    0.8 %  {s:#x}" in text, text
            assert "    waiting        32.00 MiB" in text, text
            """
        )

    def test_a_device_with_a_context_and_no_tensor(self) -> None:
        text = run(
            """
            a = alloc(MIB)
            put_in_place(card(0, own=520 * MIB), card(1, own=518 * MIB, others=[(4711, 100 * MIB)]))
            sys.modules["pynvml"].cards[1].free = 8 * GIB - 640 * MIB
            outside()
            i = info(1)
            assert (i.reserved, i.context, i.in_processes) == (0, 518 * MIB, 100 * MIB), i
            assert i.unexplained == 22 * MIB, i
            print(i.note)
            assert len(gpumemx.memory_info()) == 2
            assert gpumemx.memory_summary().count(" memory, ") == 2
            """
        )
        assert text == "this process has a CUDA context there (518.00 MiB) and no tensor\n"


class TestUnknown:
    pytestmark = with_adapter

    def test_each_function_of_nvml_may_fail(self) -> None:
        run(
            """
            a = alloc(100 * MIB)
            take(900 * MIB)
            outside({0: [(1 << 40, 64 * MIB)]})
            from fake_nvml import FakeNvml
            essential = {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex",
                         "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUUID", "nvmlDeviceGetName",
                         "nvmlDeviceGetComputeRunningProcesses"}
            for error in (NVMLError("Not Supported"), OSError("no library"), KeyError("x")):
                for name in FakeNvml.FUNCTIONS:
                    cards = card(0, own=700 * MIB, others=[(4711, 200 * MIB)]), card(1)
                    machine = put_in_place(*cards)
                    machine.broken[name] = error
                    i = info()
                    if name in essential:
                        assert i.context is None and i.processes is None, (name, i)
                        assert (i.outside, i.unexplained) == (64 * MIB, 836 * MIB), (name, i)
                        reason = f"NVML: {error}"
                        assert i.unknown == {"context": reason, "processes": reason}, i
                        text = gpumemx.memory_summary(0)
                        assert "    context          unknown" in text, text
                        assert f"Unknown: context, processes ({reason})." in text, text
                    else:
                        assert (i.context, i.in_processes) == (536 * MIB, 200 * MIB), (name, i)
                        assert i.unknown == {}, (name, i)
            """
        )

    def test_without_the_package(self) -> None:
        run(
            """
            a = alloc(MIB)
            sys.modules["pynvml"] = None
            i = info()
            assert i.unknown["processes"] == "the package nvidia-ml-py is not installed", i
            """
        )

    def test_process_ids_of_another_namespace(self) -> None:
        run(
            """
            a = alloc(100 * MIB)
            take(900 * MIB)
            put_in_place(card(0, others=[(31, 618 * MIB), (32, 200 * MIB)]), card(1))
            outside()
            i = info()
            assert i.context is None and i.processes is None and i.unexplained == 900 * MIB, i
            assert "which is which is not known" in i.unknown["processes"], i
            """
        )

    def test_no_figure_for_this_process_or_another(self) -> None:
        run(
            """
            a = alloc(100 * MIB)
            take(900 * MIB)
            outside()
            put_in_place(card(0, others=[(OWN, None), (4711, 200 * MIB)]), card(1))
            i = info()
            assert i.context is None and i.in_processes == 200 * MIB, i
            assert i.unexplained == 700 * MIB
            for nothing in (None, (1 << 64) - 1):
                put_in_place(card(0, own=600 * MIB, others=[(4711, nothing), (4712, MIB)]), card(1))
                i = info()
                assert i.context == 500 * MIB and i.in_processes == MIB, i
                assert [p.bytes for p in i.processes] == [MIB, None]
                assert i.unknown["processes"] == "NVML does not tell how much 1 of them use", i
                assert i.unexplained == 399 * MIB, i
            """
        )

    def test_a_figure_that_cannot_be_right_is_not_shown(self) -> None:
        run(
            """
            a = alloc(100 * MIB)
            take(900 * MIB)
            outside()
            put_in_place(card(0, own=60 * MIB), card(1))
            i = info()
            assert i.context is None and i.unexplained == 900 * MIB, i
            assert "NVML counts 60.00 MiB" in i.unknown["context"], i
            # Is some of that another process's? Neither figure is trusted then.
            outside({0: [(1 << 40, 512 * MIB)]})
            put_in_place(card(0, own=600 * MIB), card(1))
            i = info()
            assert i.context is None and i.outside is None and i.unexplained == 900 * MIB, i
            assert "has allocated 612.00 MiB" in i.unknown["outside"] == i.unknown["context"], i
            assert "    outside          unknown" in gpumemx.memory_summary(0)
            outside()
            # Another process's memory went between two questions.
            put_in_place(card(0, own=600 * MIB, others=[(4711, 500 * MIB)]), card(1))
            i = info()
            assert i.unexplained == -100 * MIB, i
            assert "changed" in i.unknown["unexplained"], i
            assert "-100.00 MiB" in gpumemx.memory_summary(0)
            """
        )

    def test_where_the_walk_was_cut_short_the_context_is_unknown(self) -> None:
        run(
            """
            a = alloc(100 * MIB)
            take(900 * MIB)
            put_in_place(card(0, own=700 * MIB), card(1))
            outside({0: [(1 << 40, 64 * MIB)]}, unknown="too many addresses")
            i = info()
            assert i.context is None and i.outside is None and i.unexplained == 900 * MIB, i
            assert i.unknown == {"context": "too many addresses", "outside": "too many addresses"}
            """
        )


class TestNccl:
    """Case A14 (nvidia-smi still shows memory): what NCCL holds is one of the causes."""

    pytestmark = with_adapter

    START = """
            a = alloc(100 * MIB)
            take(900 * MIB)
            put_in_place(card(0, own=700 * MIB, others=[(4711, 200 * MIB)]), card(1))
            outside({0: [(1 << 40, 64 * MIB), (1 << 41, 20 * MIB)]})
    """

    def test_it_is_taken_from_outside(self) -> None:
        run(
            self.START
            + """
            i = info()
            assert (i.nccl, i.outside, i.context) == (0, 84 * MIB, 516 * MIB), i
            assert " nccl " not in gpumemx.memory_summary(0)
            nccl(60 * MIB)
            i = info()
            assert (i.nccl, i.outside, i.context) == (60 * MIB, 24 * MIB, 516 * MIB), i
            assert i.unexplained == 100 * MIB and i.unknown == {}, i
            text = gpumemx.memory_summary(0)
            assert "    nccl           60.00 MiB    0.7 %  by NCCL's communicators" in text, text
            assert "    outside        24.00 MiB    0.3 %  by this process, not by torch" in text
            nccl(84 * MIB)
            assert (info().nccl, info().outside) == (84 * MIB, 0)
            """
        )

    def test_what_is_not_known_stays_in_outside(self) -> None:
        run(
            self.START
            + """
            nccl(unknown="NCCL 2.28.9 does not tell what it holds, 2.29.7 does")
            i = info()
            assert (i.nccl, i.outside, i.context) == (None, 84 * MIB, 516 * MIB), i
            assert i.unknown == {"nccl": "NCCL 2.28.9 does not tell what it holds, 2.29.7 does"}, i
            text = gpumemx.memory_summary(0)
            assert "    nccl             unknown" in text, text
            assert "Unknown: nccl (NCCL 2.28.9 does not tell" in text, text
            """
        )

    def test_more_than_there_is_outside_is_not_shown(self) -> None:
        run(
            self.START
            + """
            nccl(84 * MIB + 1)
            i = info()
            assert (i.nccl, i.outside, i.context) == (None, 84 * MIB, 516 * MIB), i
            assert "allocated only 84.00 MiB outside of torch" in i.unknown["nccl"], i
            """
        )

    def test_its_own_count_is_there_where_outside_is_unknown(self) -> None:
        run(
            self.START
            + """
            outside({0: [(1 << 40, 64 * MIB)]}, unknown="too many addresses")
            nccl(80 * MIB)
            i = info()
            assert (i.nccl, i.outside, i.context) == (80 * MIB, None, None), i
            assert i.unexplained == 900 * MIB - 200 * MIB - 80 * MIB, i
            """
        )


class TestMemoryOfOthers:
    """What another process has allocated and this one has mapped is that process's."""

    pytestmark = with_adapter

    def test_tensors_that_torch_has_received_are_skipped(self) -> None:
        run(
            """
            from gpumemx import _memory
            assert _memory._received() == []
            import torch.multiprocessing.reductions as r
            of = lambda size: torch.empty(size, dtype=torch.uint8).untyped_storage()
            received, sent, of_host = of(1000), of(500), of(200)
            r.shared_cache[(b"handle", 0)] = r.StorageWeakRef(received)
            r.shared_cache[b"handle"] = r.StorageWeakRef(sent)
            r.shared_cache[(1234, 5)] = r.StorageWeakRef(of_host)
            place = (received.data_ptr(), 1000)
            assert _memory._received() == [place], _memory._received()
            asked = []
            driver = Other({})
            _outside.Driver.if_started = classmethod(lambda cls: driver)
            _outside.find = lambda driver, skip: asked.append(list(skip)) or driver.found
            put_in_place(card(0), card(1))
            info()
            assert all(place in skip for skip in asked) and asked, asked
            del received
            assert _memory._received() == []
            """
        )

    def test_on_a_card_without_this_process_nothing_is_its(self) -> None:
        # As with a peer's memory that the process over there has shared.
        run(
            """
            a = alloc(MIB)
            put_in_place(card(0, own=520 * MIB), card(1, others=[(4711, 700 * MIB)]))
            sys.modules["pynvml"].cards[1].free = 8 * GIB - 720 * MIB
            outside({1: [(1 << 40, 300 * MIB)]}, contexts=(0,))
            i = info(1)
            assert (i.outside, i.context, i.in_processes) == (0, 0, 700 * MIB), i
            assert i.unexplained == 20 * MIB and i.unknown == {}, i
            """
        )


class TestDevices:
    pytestmark = with_adapter

    def test_all_devices_by_default_and_each_by_any_name(self) -> None:
        run(
            """
            put_in_place(card(0), card(1))
            a, b = alloc(64 * MIB), alloc(32 * MIB, device=1)
            both = gpumemx.memory_info()
            assert [(i.device, i.live) for i in both] == [(0, 64 * MIB), (1, 32 * MIB)], both
            for name in (1, "cuda:1", torch.device("cuda", 1), "GPU-1"):
                assert gpumemx.memory_info(name).live == 32 * MIB, name
            text = gpumemx.memory_summary()
            assert text.index("GPU 0 memory") < text.index("GPU 1 memory")
            free(b)
            assert "GPU 1" in gpumemx.memory_summary(), "its cache is memory too"
            gpumemx.clear_cache(wait=True)
            assert "GPU 1" not in gpumemx.memory_summary()
            """
        )

    def test_clearing_takes_all_devices(self) -> None:
        run(
            """
            a, b, c = alloc(64 * MIB), alloc(32 * MIB, device=1), alloc(8 * MIB, device=1)
            free(a), free(b)
            r = gpumemx.clear_cache(wait=True)
            assert (r.device, r.released, r.live) == (None, 96 * MIB, 8 * MIB), r
            assert r.predicted == r.released
            assert str(r).splitlines() == [
                "GPU 0: 64.00 MiB given back",
                "GPU 1: 32.00 MiB given back; 8.00 MiB in use",
            ], str(r)
            assert r.to_dict()["devices"][1]["released"] == 32 * MIB
            gpumemx.clear_cache(wait=True)
            free(c)
            gpumemx.clear_cache(1, wait=True)
            assert str(gpumemx.clear_cache()) == "nothing to give back: nothing is reserved"
            """
        )


def test_before_cuda_has_started_nvml_tells() -> None:
    text = """
    import os, sys
    sys.path.insert(0, TESTS)
    import fake_nvml, gpumemx
    cards = [fake_nvml.FakeCard(f"GPU-{i}", total=8 << 30, reserved=600 << 20,
             free=(8 << 30) - (300 << 20), processes=[(4711, 290 << 20)]) for i in range(3)]
    fake_nvml.put_in_place(*cards)
    every = gpumemx.memory_info()
    assert [i.device for i in every] == [0, 1]
    for i in every:
        assert (i.total, i.free, i.others) == (8 << 30, (8 << 30) - (300 << 20), 300 << 20), i
        assert (i.reserved, i.live, i.context, i.in_processes) == (0, 0, 0, 290 << 20), i
        assert i.unexplained == 10 << 20 and i.device_known and i.allocator == "none", i
    assert gpumemx.memory_info("GPU-2").device == 0
    assert "torch" not in sys.modules
    print(gpumemx.memory_summary())
    """
    printed = output(
        textwrap.dedent(text).replace("TESTS", repr(TESTS)), CUDA_VISIBLE_DEVICES="2,0"
    )
    assert printed.count("GPU 0 memory, 8.00 GiB in all") == 1
    assert "    process       290.00 MiB    3.5 %  ?, pid 4711" in printed
    assert max(map(len, printed.splitlines())) <= 72


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(_nvml, "_started_in", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield put_in_place(FakeCard("GPU-0"))
    _nvml._started_in = 0


def test_processes_are_merged_from_all_lists(machine: FakeNvml) -> None:
    card = machine.cards[0]
    card.processes = [(11, 100), (12, None), (13, 7)]
    card.graphics = [(11, 120), (12, 5), (14, 300)]
    machine.names = {11: "/opt/bin/python -m x", 14: "/usr/lib/xorg/Xorg"}
    found = _nvml.processes(card)
    assert [(p.pid, p.bytes) for p in found] == [(14, 300), (11, 120), (13, 7), (12, 5)]
    assert [p.name for p in found[:2]] == ["Xorg", "python"]
    assert str(found[0]) == "Xorg (pid 14)"


def test_a_name_that_nvml_does_not_know_is_looked_up(machine: FakeNvml) -> None:
    machine.cards[0].processes = [(os.getpid(), 5), (1 << 30, 4)]
    mine, none = _nvml.processes(machine.cards[0])
    assert mine.name == Path("/proc/self/comm").read_text().split()[0]
    assert none.name == ""


def test_memory_is_what_cuda_counts(machine: FakeNvml) -> None:
    card = machine.cards[0]
    card.reserved = 615 * MIB
    assert _nvml.memory(card) == (8 * GIB, 8 * GIB)
    del FakeNvml.nvmlMemory_v2
    try:
        assert _nvml.memory(card) == (8 * GIB + 615 * MIB, 8 * GIB)
    finally:
        FakeNvml.nvmlMemory_v2 = 2


def test_a_forked_child_starts_nvml_anew(machine: FakeNvml) -> None:
    _nvml.cards()
    _nvml.cards()
    assert machine.called.count("nvmlInit") == 1
    _nvml._started_in = -1  # as in a child
    _nvml.cards()
    assert machine.called.count("nvmlInit") == 2


def test_without_a_device_the_list_says_why() -> None:
    (only,) = gpumemx.memory_info() if _memory.device_count() == 0 else [None]
    if only is not None:
        assert only.note
        assert (only.total, only.reserved) == (0, 0)


def test_the_table_leaves_out_what_is_zero() -> None:
    info = gpumemx.MemoryInfo(
        0, "gpumemx", total=8 * GIB, free=8 * GIB, device_known=True, context=0, nccl=0,
        outside=0, processes=(),
    )  # fmt: skip
    from gpumemx import summary

    lines = summary._table(info).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "live",
        "workspaces",
        *("pending", "cached", "held", "reserved", "others", "free"),
    ]


def test_many_processes_are_counted_together() -> None:
    processes = tuple(gpumemx.GpuProcess(4_000_000 + i, "n" * 60, MIB) for i in range(20))
    info = gpumemx.MemoryInfo(
        0, "gpumemx", total=8 * GIB, free=7 * GIB, others=GIB, device_known=True, context=5 * MIB,
        processes=processes, unexplained=1 * MIB, nccl=0, outside=998 * MIB,
        workspaces=0,
        unknown={"outside": "a reason of many words " * 12},
    )  # fmt: skip
    from gpumemx import summary

    text = summary._table(info)
    assert max(map(len, text.splitlines())) <= 72
    assert text.count("pid ") == 6
    assert re.search(r"processes +14\.00 MiB +0\.2 %  14 more", text)
    assert "outside       998.00 MiB   12.2 %  by this process, not by torch" in text
    assert "unexplained     1.00 MiB    0.0 %  see the docs" in text
