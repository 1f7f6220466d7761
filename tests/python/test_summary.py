# SPDX-License-Identifier: BSD-3-Clause
"""memory_info, memory_summary and clear_cache."""

import re
import textwrap

import pytest
from torch_tools import SIMULATED, output, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]


def test_the_parts_add_up_at_every_step() -> None:
    simulated(
        """
        import random
        pick, held = random.Random(3), []
        for step in range(300):
            if held and pick.random() < 0.45:
                free(held.pop(pick.randrange(len(held))))
            else:
                held.append(alloc(pick.choice((300, 7000, 2 * MIB, 30 * MIB + 5)),
                                  stream=pick.choice((1, 3))))
            i = gpumemx.memory_info(0)
            assert i.total == i.reserved + i.others + i.free == 8 * GIB, i
            assert i.reserved == i.live + i.pending + i.cached + i.held, i
            assert i.live == torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["current"]
            assert i.device_known and i.allocator == "gpumemx" and i.note == ""
        assert i.to_dict()["live"] == i.live
        try:
            i.live = 0
            raise AssertionError("it is frozen")
        except AttributeError:
            pass
        """
    )


def test_the_table_fits_a_terminal_and_explains_the_state() -> None:
    text = simulated(
        """
        a, b = alloc(900 * MIB), alloc(400 * MIB)
        free(b)
        print(gpumemx.memory_summary(0))
        free(a)
        """
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 72
    assert lines[0] == "GPU 0 memory, allocator gpumemx, 8.00 GiB in all"
    assert [line.split()[0] for line in lines if re.match("  [a-z]", line)] == [
        *("live", "pending", "cached", "held", "reserved", "others", "free"),
    ]
    assert re.search(r"live +900\.00 MiB +11\.0 %", text)
    assert "400.00 MiB is cached; clear_cache() would give it back." in lines
    assert not any(line.endswith(" ") for line in lines)


def test_clearing_says_what_came_back_and_what_did_not() -> None:
    first, second = simulated(
        """
        a, b = alloc(64 * MIB), alloc(100 * MIB)
        free(b)
        r = gpumemx.clear_cache(0, wait=True)
        assert r.predicted == r.released
        assert (r.released, r.stayed) == (100 * MIB, {"live": 64 * MIB}), r
        assert gpumemx.memory_info(0).cached == 0
        print(r)
        free(a)
        r = gpumemx.clear_cache("cuda:0", wait=False)
        assert r.released + r.pending == 64 * MIB and r.predicted == r.released, r
        assert gpumemx.clear_cache(0, wait=True).released == r.pending
        assert gpumemx.memory_info(0).reserved == 0
        assert r.to_dict()["device"] == 0
        print(gpumemx.clear_cache(0))
        """
    ).splitlines()
    assert first == "GPU 0: 100.00 MiB given back; 64.00 MiB in use"
    assert second == "GPU 0: 0 B given back"


def test_collect_frees_what_cycles_hold() -> None:
    simulated(
        """
        import gc
        gc.disable()
        class Tensor:
            def __init__(self): self.a, self.me = alloc(64 * MIB), self
            def __del__(self): free(self.a)
        Tensor()
        assert gpumemx.clear_cache(0).released == 0
        assert gpumemx.clear_cache(0, collect=True).released == 64 * MIB
        """
    )


def test_a_cap_is_shown() -> None:
    simulated(
        """
        alloc(MIB)
        assert gpumemx.memory_info(0).cap is None
        adapter_cap = 4 * GIB
        torch._C._cuda_setMemoryFraction(0.5, 0)
        assert gpumemx.memory_info(0).cap == 4 * GIB
        """
    )


def test_a_device_that_is_not_there_is_an_error() -> None:
    simulated(
        """
        for read in (gpumemx.memory_info, gpumemx.memory_summary, gpumemx.clear_cache):
            for device, kind in ((2, IndexError), (-1, ValueError), ("cpu", ValueError),
                                 (torch.device("cpu"), ValueError), (1.5, TypeError)):
                try:
                    read(device)
                    raise AssertionError((read, device))
                except kind:
                    pass
        """
    )


def test_a_device_without_allocations_says_so() -> None:
    assert simulated(
        """
        alloc(MIB)
        print(gpumemx.memory_summary(1), gpumemx.memory_info(1), gpumemx.clear_cache(1), sep="\\n")
        """
    ).splitlines() == [
        "GPU 1: nothing was allocated on this device yet.",
        "GPU 1: nothing was allocated on this device yet",
        "GPU 1: 0 B given back",
    ]


@pytest.mark.parametrize("first", ["", "import torch\n"])
def test_without_a_device_or_torch_they_say_so_and_do_not_raise(first: str) -> None:
    text = output(
        first
        + "import gpumemx\n"
        + "(i,) = gpumemx.memory_info()\n"
        + "assert (i.total, i.reserved, i.live, i.allocator) == (0, 0, 0, 'none')\n"
        + "print(i, gpumemx.memory_summary(), gpumemx.clear_cache(), sep='\\n')\n",
        CUDA_VISIBLE_DEVICES="",
    )
    reason = "no CUDA device is visible to PyTorch" if first else "PyTorch is not imported yet"
    assert text.splitlines() == [
        f"GPU 0: {reason}",
        f"GPU 0: {reason}.",
        f"nothing to give back: {reason}",
    ]


def test_clearing_waits_for_nothing_unless_asked() -> None:
    simulated(
        """
        s = adapter._sim_new_stream(0)
        a, b, c = (adapter._sim_alloc_on(0, n * MIB, s) for n in (64, 32, 16))
        free(b)
        gpumemx.clear_cache(wait=True)
        adapter._sim_stop_work(0)
        adapter._sim_launch(0, s)
        free(a)
        before = adapter.driver_figures(0)["calls"].get("wait", 0)
        r = gpumemx.clear_cache(0)
        assert (r.predicted, r.released, r.pending) == (0, 0, 64 * MIB), r
        assert r.text == "0 B given back; 16.00 MiB in use; 64.00 MiB still used by queued work"
        assert adapter.driver_figures(0)["calls"].get("wait", 0) == before
        i = gpumemx.memory_info(0)
        assert (i.waiting, i.releasable, i.releasable_by_waiting) == (64 * MIB, 0, 64 * MIB), i
        assert "clear_cache() would give 0 B of it back" in i.state, i.state
        """
    )


def test_predictions_are_kept_to_the_byte_in_random_programs() -> None:
    # The background thread gives some back by itself.
    alone = SIMULATED.replace('install("",', 'install("background:false",')
    assert alone != SIMULATED
    text = """
        import random
        for seed in range(6):
            pick, held = random.Random(seed), []
            streams = [adapter._sim_new_stream(0) for _ in range(3)]
            for step in range(300):
                choice = pick.random()
                if choice < 0.06:
                    wait = pick.random() < 0.5
                    expected = gpumemx.memory_info(0)
                    r = gpumemx.clear_cache(0, wait=wait)
                    assert r.released == r.predicted, (seed, step, r)
                    # Meanwhile some work may have come to its end.
                    least = expected.releasable_by_waiting if wait else expected.releasable
                    assert least <= r.released <= expected.releasable_by_waiting, (seed, step, r)
                    after = gpumemx.memory_info(0)
                    assert after.reserved == expected.reserved - r.released
                    if wait: assert after.releasable_by_waiting == 0, after
                elif held and choice < 0.5:
                    a = held.pop(pick.randrange(len(held)))
                    if pick.random() < 0.3: adapter._sim_record_stream(0, a, pick.choice(streams))
                    adapter._sim_launch(0, pick.choice(streams))
                    free(a)
                else:
                    size = pick.choice((300, 7000, 2 * MIB, 30 * MIB + 5, 90 * MIB))
                    held.append(adapter._sim_alloc_on(0, size, pick.choice(streams)))
            while held: free(held.pop())
        r = gpumemx.clear_cache(0, wait=True)
        assert gpumemx.memory_info(0).reserved == 0, r
        """
    output(alone + textwrap.dedent(text))
