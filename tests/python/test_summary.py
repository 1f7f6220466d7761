# SPDX-License-Identifier: BSD-3-Clause
"""memory_info, memory_summary and clear_cache."""

import re

import pytest
from torch_tools import output, simulated

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
    assert [line.split()[0] for line in lines[1:8]] == [
        "live",
        "pending",
        "cached",
        "held",
        "reserved",
        "others",
        "free",
    ]
    assert re.search(r"live +900\.00 MiB +11\.0 %", text)
    assert lines[-1] == "400.00 MiB is cached; clear_cache() would give it back."
    assert not any(line.endswith(" ") for line in lines)


def test_clearing_says_what_came_back_and_what_did_not() -> None:
    first, second = simulated(
        """
        a, b = alloc(64 * MIB), alloc(100 * MIB)
        free(b)
        r = gpumemx.clear_cache(0)
        assert (r.released, r.stayed) == (100 * MIB, {"live": 64 * MIB}), r
        assert gpumemx.memory_info(0).cached == 0
        print(r)
        free(a)
        r = gpumemx.clear_cache("cuda:0", wait=False)
        assert r.released + r.pending == 64 * MIB, r
        assert gpumemx.clear_cache(0).released == r.pending
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
        "GPU 1: nothing was allocated there yet.",
        "GPU 1: nothing was allocated on this device yet",
        "GPU 1: 0 B given back",
    ]


@pytest.mark.parametrize("first", ["", "import torch\n"])
def test_without_a_device_or_torch_they_say_so_and_do_not_raise(first: str) -> None:
    text = output(
        first
        + "import gpumemx\n"
        + "i = gpumemx.memory_info()\n"
        + "assert (i.total, i.reserved, i.live, i.allocator) == (0, 0, 0, 'none')\n"
        + "print(i, gpumemx.memory_summary(), gpumemx.clear_cache(), sep='\\n')\n",
        CUDA_VISIBLE_DEVICES="",
    )
    reason = "no CUDA device is visible to PyTorch" if first else "PyTorch is not imported yet"
    assert text.splitlines() == [
        f"GPU 0: {reason}",
        f"GPU 0: {reason}.",
        f"GPU 0: nothing to give back: {reason}",
    ]
