# SPDX-License-Identifier: BSD-3-Clause
"""on_memory_pressure: what functions are told, what they may do, and what they cannot break."""

import gpumemx
import pytest
from torch_tools import program, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]


def test_it_is_told_what_is_wanted_and_may_free_it() -> None:
    simulated(
        """
        kept, told = [alloc(4 * GIB), alloc(2 * GIB), alloc(GIB, device=1)], []
        def unload(pressure):
            told.append(pressure)
            free(kept.pop(0))
        gpumemx.on_memory_pressure(unload)
        alloc(MIB)  # nothing is short
        assert told == []
        alloc(3 * GIB)
        (one,) = told
        assert isinstance(one, gpumemx.MemoryPressure)
        assert (one.device, one.size, one.stream, one.attempt) == (0, 3 * GIB, 0, 1), one
        # A small request takes a little more from the device than itself.
        assert 2 * GIB - 32 * MIB <= one.free + one.cached <= 2 * GIB - MIB, one
        assert torch._C._cuda_memoryStats(0)["num_ooms"] == 0
        assert torch._C._cuda_memoryStats(0)["num_alloc_retries"] == 1
        """
    )


def test_the_device_and_the_stream_are_those_of_the_request() -> None:
    simulated(
        """
        told, kept = [], [alloc(6 * GIB), alloc(6 * GIB, device=1)]
        gpumemx.on_memory_pressure(lambda p: told.append((p.device, p.stream)) or False)
        for device, stream in ((1, 1), (0, 7)):
            try:
                alloc(3 * GIB, device=device, stream=stream)
                raise AssertionError
            except torch.OutOfMemoryError:
                pass
        assert told == [(1, 0), (0, 7)], told
        """
    )


def test_false_fails_at_once_and_all_are_asked_in_order() -> None:
    simulated(
        """
        asked, kept = [], alloc(6 * GIB)
        first = gpumemx.on_memory_pressure(lambda p: asked.append(1) or False)
        second = gpumemx.on_memory_pressure(lambda p: asked.append(2) or False)
        def fails(size=3 * GIB):
            try:
                alloc(size)
                raise AssertionError
            except torch.OutOfMemoryError:
                pass
        fails(9 * GIB)  # more than the device has: whatever is freed will not do
        assert asked == []
        fails()
        assert asked == [1, 2]
        first.remove(), first.remove()
        fails()
        assert asked == [1, 2, 2]
        with gpumemx.on_memory_pressure(lambda p: asked.append(3) or False):
            fails()
        assert asked == [1, 2, 2, 2, 3]
        second.remove()
        fails()
        assert asked == [1, 2, 2, 2, 3]
        """
    )


def test_a_function_that_fails_does_not_hide_the_error() -> None:
    done = program(
        """
        import sys
        import gpumemx, torch
        from gpumemx import _adapter
        adapter = _adapter.load()
        adapter.install("", {}, simulated_devices=1, simulated_bytes=8 << 30)
        kept, called = [adapter._sim_alloc(0, 6 << 30, 1)], []
        def bad(pressure):
            called.append(1)
            raise KeyError("a bug")
        def exits(pressure):
            called.append(2)
            sys.exit(3)
        gpumemx.on_memory_pressure(bad), gpumemx.on_memory_pressure(exits)
        try:
            adapter._sim_alloc(0, 3 << 30, 1)
            raise AssertionError
        except torch.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate 3.00 GiB"), error
            assert error.__context__ is None
        assert called == [1, 2]
        # The next one helps although they fail.
        gpumemx.on_memory_pressure(lambda p: adapter._sim_free(kept.pop()))
        adapter._sim_alloc(0, 3 << 30, 1)
        assert called == [1, 2, 1, 2]
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a callback of on_memory_pressure() failed") == 4
    assert "KeyError: 'a bug'" in done.stderr


def test_it_may_allocate_look_and_fail_itself() -> None:
    simulated(
        """
        kept, depth = [alloc(7 * GIB)], []
        def unload(pressure):
            depth.append(len(depth))
            free(alloc(MIB))
            gpumemx.memory_info(0), gpumemx.memory_summary(0), gpumemx.clear_cache(0)
            try:
                alloc(5 * GIB)  # asks nobody
                raise AssertionError
            except torch.OutOfMemoryError:
                pass
            with gpumemx.on_memory_pressure(unload):
                pass
            free(kept.pop())
        gpumemx.on_memory_pressure(unload)
        alloc(6 * GIB)
        assert depth == [0]
        """
    )


def test_threads_that_fail_at_once_do_not_wait_for_each_other() -> None:
    simulated(
        """
        import threading
        both, held = threading.Barrier(2, timeout=60), {}
        def unload(pressure):
            both.wait()  # both functions run at the same time
            free(held.pop(pressure.device))
        gpumemx.on_memory_pressure(unload)
        for device in (0, 1): held[device] = alloc(6 * GIB, device=device)
        threads = [threading.Thread(target=alloc, args=(4 * GIB, d)) for d in (0, 1)]
        for t in threads: t.start()
        for t in threads: t.join(60)
        assert not held and not any(t.is_alive() for t in threads)
        """
    )


def test_registered_before_the_installation_it_is_asked_too() -> None:
    simulated(
        """
        from gpumemx import pressure
        pressure._connected = False
        pressure._callbacks.clear()
        called, kept = [], alloc(6 * GIB)
        entry = gpumemx.pressure.PressureCallback(lambda p: called.append(p) or False)
        pressure._callbacks.append(entry)
        gpumemx.install_allocator()  # it is there already, and learns of it
        try:
            alloc(3 * GIB)
            raise AssertionError
        except torch.OutOfMemoryError:
            assert len(called) == 1
        """
    )


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a function, not int"):
        gpumemx.on_memory_pressure(3)  # type: ignore[arg-type]


def test_without_gpumemx_it_waits_to_be_asked() -> None:
    called: list[gpumemx.MemoryPressure] = []
    entry = gpumemx.on_memory_pressure(called.append)
    entry.remove()
    assert called == []
