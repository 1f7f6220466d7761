# SPDX-License-Identifier: BSD-3-Clause
"""The interface on the second device, and that nothing starts a device that nobody uses."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "python"
sys.path.insert(0, str(TOOLS))

from torch_tools import output, require_devices  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    require_devices(2)


def run(text: str) -> str:
    return output(textwrap.dedent(text))


@pytest.mark.parametrize("allocator", ["gpumemx", "torch"])
def test_every_call_takes_every_name_of_the_second_device(allocator: str) -> None:
    run(
        f"""
        import gpumemx, torch
        if {allocator == "gpumemx"}: gpumemx.install_allocator()
        MIB = 1 << 20
        torch.zeros(1, device="cuda:0")
        x = torch.zeros(300 * MIB, dtype=torch.uint8, device="cuda:1")
        for name in (1, "cuda:1", torch.device("cuda", 1)):
            info = gpumemx.memory_info(name)
            assert info.device == 1 and info.live == 300 * MIB, info
            assert gpumemx.memory_summary(name).startswith("GPU 1 memory")
            with gpumemx.monitor("second", device=name) as m:
                y = torch.zeros(100 * MIB, dtype=torch.uint8, device=name)
                z = torch.zeros(50 * MIB, dtype=torch.uint8, device="cuda:0")
            assert m.device == 1, m.device
            assert m.delta == 100 * MIB, m
            if gpumemx.is_installed(): assert m.peak == 400 * MIB, m
            del y, z
            released = gpumemx.clear_cache(name)
            assert released.device == 1, released
            assert gpumemx.memory_info(name).cached == 0
        assert gpumemx.memory_info(0).live < MIB
        torch.cuda.set_device(1)
        assert gpumemx.memory_info().device == 1  # the current one
        for call in (gpumemx.memory_info, gpumemx.memory_summary, gpumemx.clear_cache):
            try:
                call(torch.cuda.device_count())
                raise AssertionError(f"{{call}} knows no such device")
            except IndexError:
                pass
        """
    )


def test_figures_of_both_devices_are_apart() -> None:
    run(
        """
        import gpumemx, torch
        gpumemx.install_allocator()
        MIB = 1 << 20
        held = {d: torch.zeros((d + 1) * 64 * MIB, dtype=torch.uint8, device=f"cuda:{d}")
                for d in (0, 1)}
        for d in (0, 1):
            assert gpumemx.memory_info(d).live == (d + 1) * 64 * MIB
            assert torch.cuda.memory_allocated(d) == (d + 1) * 64 * MIB
            assert {s["device"] for s in torch.cuda.memory_snapshot()} == {0, 1}
        torch.cuda.set_per_process_memory_fraction(0.01, 1)
        try:
            torch.zeros(8 << 30, dtype=torch.uint8, device="cuda:1")
            raise AssertionError("there is a cap")
        except torch.OutOfMemoryError as error:
            assert "GPU 1" in str(error), error
        torch.zeros(8 << 30, dtype=torch.uint8, device="cuda:0")  # has none
        """
    )


# Contexts show as this process among the compute processes of a device. NVML may see no processes,
# or other numbers for them, from within a container: then what the driver says of each device's
# primary context counts, for this process alone.
CONTEXTS = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def active():
    "The devices whose primary context is active in this process."
    found = []
    count = ctypes.c_int()
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    for device in range(count.value):
        flags, state = ctypes.c_uint(), ctypes.c_int()
        assert cuda.cuDevicePrimaryCtxGetState(
            device, ctypes.byref(flags), ctypes.byref(state)) == 0
        if state.value: found.append(device)
    return found

def on_device(pid):
    "The devices on which NVML shows this process; None where it shows no process anywhere."
    import pynvml
    pynvml.nvmlInit()
    shown = {d: [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(
        pynvml.nvmlDeviceGetHandleByIndex(d))] for d in range(pynvml.nvmlDeviceGetCount())}
    return [d for d, pids in shown.items() if pid in pids] or None
"""

USE_THE_SECOND = """
import os, gpumemx
gpumemx.install_allocator()
import torch
assert active() == [], active()
gpumemx.memory_info(0), gpumemx.memory_summary(1), gpumemx.clear_cache(0)
assert active() == [], active()
torch.cuda.set_device(1)
x = torch.randn(1000, 1000, device="cuda")
with gpumemx.monitor("product") as m:
    y = x @ x
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    z = y + 1
z.record_stream(torch.cuda.current_stream())
z.record_stream(side)
del x, z
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    held = torch.zeros(1 << 22, device="cuda")
torch.cuda.memory_stats(1), torch.cuda.memory._snapshot(), torch.cuda.empty_cache()
torch.cuda.memory._record_memory_history(max_entries=100)
del held, pool
torch.cuda.memory._record_memory_history(enabled=None)
for device in (0, 1):
    gpumemx.memory_info(device), gpumemx.memory_summary(device), gpumemx.clear_cache(device)
torch.cuda.synchronize()
"""


def test_no_context_on_the_first_device() -> None:
    run(
        CONTEXTS
        + USE_THE_SECOND
        + """
assert active() == [1], f"contexts on {active()}"
shown = on_device(os.getpid())
assert shown in (None, [1]), shown
"""
    )


def test_the_visible_devices_are_the_devices() -> None:
    """CUDA_VISIBLE_DEVICES=1: the second card is device 0, of gpumemx too."""
    text = """
    import gpumemx, torch
    gpumemx.install_allocator()
    assert torch.cuda.device_count() == 1
    x = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda:0")
    assert gpumemx.memory_info(0).live == 1 << 28
    try:
        gpumemx.memory_info(1)
        raise AssertionError("there is no device 1")
    except IndexError:
        pass
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    output(textwrap.dedent(text), CUDA_VISIBLE_DEVICES=visible)
