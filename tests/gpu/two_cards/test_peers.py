# SPDX-License-Identifier: BSD-3-Clause
"""Memory of one device that another uses: copies, kernels, and freeing while the other works.

python -m pytest tests/gpu/two_cards, with the built package on PYTHONPATH. Skipped with fewer than
two devices; GPUMEMX_REQUIRE_GPUS=2 makes that a failure.
"""

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


START = """
import ctypes, gpumemx, torch
gpumemx.install_allocator()
MIB = 1 << 20
ODD = -1640531527

def words(seed, count, device):
    return (torch.arange(count, dtype=torch.int32, device=device) * ODD).add_(seed)

def same(tensor, seed):
    return bool((tensor == words(seed, tensor.numel(), tensor.device)).all())

def moved(device):
    from gpumemx import _adapter
    paths = _adapter.installed().paths(device)
    return sum(paths[f"harvested_{kind}"] for kind in ("own", "loose", "other"))

def harvest(device):
    "Leave holes that fit nothing, and ask for what needs their memory."
    before = moved(device)
    for size in range(8, 40, 3):
        held = [words(i, size * MIB // 4, device) for i in range(12)]
        kept = held[::2]
        del held
        large = words(0, 7 * size * MIB // 4, device)
        assert all(same(t, 2 * i) for i, t in enumerate(kept)) and same(large, 0)
        del kept, large
    assert moved(device) > before, "no handle has moved: nothing was tried"

# The copy without peer access is this one call (TorchAllocator::memcpyAsync).
cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
cudart.cudaMemcpyPeerAsync.argtypes = [
    ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]

def copy_without_access(to, source):
    torch.cuda.synchronize(to.device)
    torch.cuda.synchronize(source.device)
    size = source.numel() * source.element_size()
    status = cudart.cudaMemcpyPeerAsync(
        to.data_ptr(), to.device.index, source.data_ptr(), source.device.index, size, None)
    assert status == 0, status
    torch.cuda.synchronize(to.device)
    torch.cuda.synchronize(source.device)
"""


def run(text: str, **environment: str) -> str:
    return output(START + textwrap.dedent(text), **environment)


MODES = [{}, {"GPUMEMX_CONF": "mode:plain"}]


@pytest.mark.parametrize("settings", MODES, ids=["mapped", "plain"])
def test_copies_without_peer_access(settings: dict[str, str]) -> None:
    run(
        """
        for there, back in ((0, 1), (1, 0)):
            for count in (1, 1000, 3 * MIB + 5, 50 * MIB):
                source = words(count, count, f"cuda:{there}")
                to = torch.zeros(count, dtype=torch.int32, device=f"cuda:{back}")
                copy_without_access(to, source)
                assert same(to, count) and same(source, count), (there, count)
        """,
        **settings,
    )


@pytest.mark.parametrize("settings", MODES, ids=["mapped", "plain"])
def test_copies_of_memory_from_before_and_after_peer_access(settings: dict[str, str]) -> None:
    run(
        """
        before = {d: words(d, 40 * MIB + 3, f"cuda:{d}") for d in (0, 1)}
        assert same(before[0].to("cuda:1"), 0)  # torch enables the access with its first copy
        assert same(before[1].to("cuda:0"), 1)
        for d in (0, 1):
            after = words(10 + d, 30 * MIB + 1, f"cuda:{d}")
            there = after.to(f"cuda:{1 - d}")
            assert same(there, 10 + d) and same(there.to(f"cuda:{d}"), 10 + d)
            # Not contiguous: a kernel of one device reads and writes the other's memory.
            wide = torch.zeros(2 * after.numel(), dtype=torch.int32, device=there.device)
            wide[::2].copy_(after)
            assert same(wide[::2], 10 + d) and int(wide[1::2].abs().max()) == 0
            after.zero_()
            after.copy_(wide[::2])
            assert same(after, 10 + d)
        """,
        **settings,
    )


def test_copies_of_memory_that_has_moved() -> None:
    run(
        """
        first = words(1, 20 * MIB, "cuda:0")
        assert same(first.to("cuda:1"), 1) and same(first.to("cuda:1").to("cuda:0"), 1)
        for d in (0, 1):
            harvest(d)
        for size in (1, 9, 33, 120, 400):
            for d in (0, 1):
                source = words(size, size * MIB // 4, f"cuda:{d}")
                there = torch.empty(2 * source.numel(), dtype=torch.int32, device=f"cuda:{1 - d}")
                there[::2].copy_(source)
                assert same(there[::2], size) and same(source.to(f"cuda:{1 - d}"), size)
        assert same(first, 1)
        """
    )


def test_memory_that_another_devices_stream_uses_is_not_given_away() -> None:
    """A kernel of device 1 reads a tensor of device 0 that was freed meanwhile: record_stream."""
    run(
        """
        import itertools
        streams = {"side": torch.cuda.Stream(device=1), "default": torch.cuda.default_stream(1)}
        a, b = words(1, 1000, "cuda:0"), words(2, 1000, "cuda:1")
        b.copy_(a), a.copy_(b)  # peer access both ways
        target = torch.zeros(16 * MIB, dtype=torch.int32, device="cuda:1")
        def as_of_device_1(tensor):
            "The same memory for kernels of device 1: torch's copies run on the source's device."
            storage = torch._C._construct_storage_from_data_pointer(
                tensor.data_ptr(), torch.device("cuda:1"), 4 * tensor.numel())
            return torch.empty(0, dtype=torch.int32, device="cuda:1").set_(
                storage, 0, tensor.shape, tensor.stride())
        one = torch.ones((), dtype=torch.int32, device="cuda:1")
        torch.mul(as_of_device_1(a), one, out=torch.empty_like(b))  # the kernel is loaded
        for (name, stream), turn in itertools.product(streams.items(), range(5)):
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            source = words(turn, 16 * MIB, "cuda:0")
            torch.cuda.synchronize(0)
            done = torch.cuda.Event()
            with torch.cuda.device(1), torch.cuda.stream(stream):
                torch.cuda._sleep(400_000_000)
                torch.mul(as_of_device_1(source), one, out=target)
                done.record(stream)
            source.record_stream(stream)
            del source
            pending = gpumemx.memory_info(0).pending
            again = [torch.full((16 * MIB,), -1, dtype=torch.int32, device="cuda:0")
                     for _ in range(3)]
            torch.cuda.synchronize(0)
            assert not done.query(), "device 0 waited for device 1, or the sleep was too short"
            assert pending >= 64 * MIB, (name, pending)
            done.synchronize()
            torch.cuda.synchronize(1)
            assert same(target, turn), name
            del again
            gpumemx.clear_cache(0)
            assert gpumemx.memory_info(0).pending == 0, name
        """
    )


def test_tensors_of_both_devices_in_threads() -> None:
    run(
        """
        import random, threading
        errors = []
        def work(seed):
            try:
                draw = random.Random(seed)
                held = []
                for turn in range(150):
                    d = draw.randrange(2)
                    held.append((turn, words(turn, draw.randrange(1, 6 * MIB), f"cuda:{d}")))
                    if len(held) > 8:
                        key, tensor = held.pop(draw.randrange(len(held)))
                        other = tensor.to(f"cuda:{1 - tensor.device.index}", non_blocking=True)
                        assert same(other, key) and same(tensor, key)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
        for d in (0, 1):
            assert gpumemx.memory_info(d).live == 0
        """
    )
