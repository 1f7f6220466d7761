# SPDX-License-Identifier: BSD-3-Clause
"""torch's side of the adapter, over simulated devices: statistics, errors, threads, ends, forks."""

import ast
import re

import pytest
from torch_tools import GIB, MIB, SIMULATED, output, program, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]


def values(text: str) -> list[object]:
    return [ast.literal_eval(line) for line in text.splitlines()]


def test_the_statistics_are_exact() -> None:
    during, after = values(
        simulated(
            """
            def figures():
                s = torch._C._cuda_memoryStats(0)
                return {k: s[k]["all"] for k in ("allocated_bytes", "requested_bytes", "allocation",
                        "reserved_bytes", "active_bytes")} | {"num_ooms": s["num_ooms"]}
            a, b, c = alloc(100 * MIB), alloc(1000), alloc(3 * MIB + 1)
            free(b)
            print(figures())
            free(a), free(c)
            print(figures())
            """
        )
    )
    assert isinstance(during, dict)
    assert isinstance(after, dict)
    third = 3 * MIB + 512
    assert during["allocated_bytes"] == {
        "current": 100 * MIB + third,
        "peak": 100 * MIB + 1024 + third,
        "allocated": 100 * MIB + 1024 + third,
        "freed": 1024,
    }
    assert during["requested_bytes"]["current"] == 103 * MIB + 1
    assert during["requested_bytes"]["allocated"] == 103 * MIB + 1001
    assert during["allocation"] == {"current": 2, "peak": 3, "allocated": 3, "freed": 1}
    assert during["active_bytes"]["current"] == 100 * MIB + third
    assert during["reserved_bytes"]["current"] >= 103 * MIB + 512
    assert after["allocated_bytes"]["current"] == after["requested_bytes"]["current"] == 0
    assert after["allocation"] == {"current": 0, "peak": 3, "allocated": 3, "freed": 3}
    assert after["num_ooms"] == 0


def test_the_peaks_can_be_reset() -> None:
    peaks = values(
        simulated(
            """
            def peak():
                return torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"]
            a, b = alloc(50 * MIB), alloc(20 * MIB)
            free(b)
            print(peak())
            torch._C._cuda_resetPeakMemoryStats(0)
            print(peak())
            torch._C._cuda_resetAccumulatedMemoryStats(0)
            print(torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"])
            """
        )
    )
    assert peaks[:2] == [70 * MIB, 50 * MIB]
    assert isinstance(peaks[2], dict)
    assert (peaks[2]["allocated"], peaks[2]["freed"]) == (0, 0)


def test_torch_accelerator_reads_the_same_allocator() -> None:
    # torch.accelerator asks c10::GetAllocator(), the rest CUDACachingAllocator::get().
    assert values(
        simulated(
            """
            a = alloc(10 * MIB, device=1)
            print(torch._C._accelerator_getDeviceStats(1)["allocated_bytes"]["all"]["current"])
            free(a)
            print(torch._C._accelerator_getDeviceStats(1)["reserved_bytes"]["all"]["current"] > 0)
            torch._C._accelerator_emptyCache()
            print(torch._C._accelerator_getDeviceStats(1)["reserved_bytes"]["all"]["current"])
            print(torch._C._accelerator_getDeviceStats(0)["allocated_bytes"]["all"]["current"])
            """
        )
    ) == [10 * MIB, True, 0, 0]


def test_devices_are_apart() -> None:
    assert values(
        simulated(
            """
            alloc(MIB, device=0), alloc(5 * MIB, device=1)
            print([gpumemx.memory_info(i).live for i in (0, 1)])
            """
        )
    ) == [[MIB, 5 * MIB]]


def size_in(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}[unit]


def test_out_of_memory_is_torchs_error_and_its_figures_add_up() -> None:
    kind, text, ooms = values(
        simulated(
            """
            kept = [alloc(1900 * MIB) for _ in range(4)]
            free(kept.pop())
            small = alloc(1000)
            try:
                alloc(7 * GIB)
            except torch.OutOfMemoryError as error:
                print(repr(type(error).__qualname__), repr(str(error)), sep="\\n")
            print(torch._C._cuda_memoryStats(0)["num_ooms"])
            """
        )
    )
    assert kind == "OutOfMemoryError"
    assert ooms == 1
    assert isinstance(text, str)
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 7.00 GiB. GPU 0 has a total capacity of 8.00 GiB of "
        "which "
    )
    size = r"(\d+(?:\.\d+)? (?:[KMG]i)?B)"
    device = re.search(
        rf"Device {size}: {size} reserved here, {size} by others, {size} free\.", text
    )
    assert device is not None, text
    total, reserved, others, rest = map(size_in, device.groups())
    assert total == pytest.approx(reserved + others + rest, abs=0.02 * GIB)
    parts = re.search(
        rf"Reserved {size}: {size} live, {size} pending, {size} held, {size} idle", text
    )
    assert parts is not None, text
    whole, *others_of_it = map(size_in, parts.groups())
    assert whole == pytest.approx(sum(others_of_it), abs=0.02 * GIB)
    assert whole == pytest.approx(reserved)
    live = re.search(rf"Of the allocated memory {size} is allocated by PyTorch", text)
    assert live is not None
    assert size_in(live[1]) == pytest.approx(3 * 1900 * MIB, rel=0.01)


def test_a_stream_that_is_none_is_named() -> None:
    output(
        """
        import torch
        from gpumemx import _adapter
        # With one device nobody asks CUDA which is the current one.
        _adapter.load().install("", {}, simulated_devices=1, simulated_bytes=8 << 30)
        raw_alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
        try:
            raw_alloc(1024, 0x777777)
            raise AssertionError("there is no such stream")
        except RuntimeError as error:
            assert "does not know the stream 0x777777" in str(error), error
        assert raw_alloc(1024, 0) != 0
        """
    )


def test_a_device_is_usable_after_out_of_memory() -> None:
    simulated(
        """
        kept = alloc(6 * GIB)
        for _ in range(3):
            try:
                alloc(3 * GIB)
                raise AssertionError("3 GiB cannot be there")
            except torch.OutOfMemoryError:
                pass
        free(kept)
        free(alloc(7 * GIB))
        assert gpumemx.memory_info(0).live == 0
        """
    )


def test_wrong_frees_are_errors_and_not_the_end() -> None:
    simulated(
        """
        a = alloc(MIB)
        free(a)
        for address in (a, 0x1234):
            try:
                free(address)
                raise AssertionError("a wrong free passed")
            except RuntimeError as error:
                assert "invalid device pointer" in str(error), error
        """
    )


def test_threads_leave_nothing_behind() -> None:
    simulated(
        """
        import random, threading
        errors = []
        def work(seed):
            try:
                pick = random.Random(seed)
                held = []
                for _ in range(2000):
                    held.append(alloc(pick.choice((512, 5000, MIB, 3 * MIB)), device=seed % 2,
                                      stream=1 + 2 * (seed % 3)))
                    if len(held) > 8:
                        free(held.pop(pick.randrange(len(held))))
                for address in held:
                    free(address)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not errors, errors
        for device in (0, 1):
            stats = torch._C._cuda_memoryStats(device)
            for key in ("allocated_bytes", "requested_bytes", "active_bytes", "allocation"):
                assert stats[key]["all"]["current"] == 0, (key, stats[key])
            assert stats["allocation"]["all"]["allocated"] == 8000
        """
    )


def test_the_snapshot_has_torchs_form() -> None:
    (snapshot,) = values(
        simulated(
            """
            kept = [alloc(30 * MIB), alloc(700), alloc(MIB, device=1)]
            free(alloc(5 * MIB))
            print(torch._C._cuda_memorySnapshot(None))
            """
        )
    )
    assert isinstance(snapshot, dict)
    assert {"segments", "device_traces", "allocator_settings"} <= set(snapshot)
    assert snapshot["device_traces"] == [[], []]
    allocated = {0: 0, 1: 0}
    for segment in snapshot["segments"]:
        assert segment["segment_type"] in ("small", "large")
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
            address += block["size"]
        assert address - segment["address"] == segment["total_size"]
        assert segment["allocated_size"] == sum(
            b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"
        )
        allocated[segment["device"]] += segment["allocated_size"]
    assert allocated == {0: 30 * MIB + 1024, 1: MIB}


ENDS = {
    "returns with blocks alive": ("kept = alloc(MIB)", 0),
    "sys.exit": ("kept = alloc(MIB); sys.exit(5)", 5),
    "os._exit": ("kept = alloc(MIB); os._exit(6)", 6),
    "an exception": ("kept = alloc(MIB); raise ValueError('wanted')", 1),
    "sys.exit in a thread": (
        "t = threading.Thread(target=lambda: (alloc(MIB), sys.exit(7))); t.start(); t.join()",
        0,
    ),
    "frees at exit": ("a = alloc(MIB); atexit.register(lambda: free(a))", 0),
    "frees by the last reference": (
        """
class Block:
    def __init__(self): self.a = alloc(MIB)
    def __del__(self, free=free): free(self.a)
torch.kept = Block(); sys.kept = [Block()]; sys.kept.append(sys.kept)
""",
        0,
    ),
    "a thread that goes on": (
        """
def work():
    while True:
        with gpumemx.monitor("on"):
            gpumemx.memory_info(0)
threading.Thread(target=work, daemon=True).start()
alloc(MIB)
""",
        0,
    ),
    "a thread that ends later": (
        "import time; threading.Thread(target=lambda: (time.sleep(0.2), free(alloc(MIB)))).start()",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_as_it_wants_to(end: str) -> None:
    text, status = ENDS[end]
    start = "import atexit, os, sys, threading\n"
    done = program(start + SIMULATED + text)
    assert done.returncode == status, done.stderr
    assert "gpumemx" not in done.stderr
    assert status == 1 or done.stderr == ""


# (From 3.12 on Python warns of a fork in a process with threads, which torch has.)
def test_a_forked_child_ignores_frees_and_ends_well() -> None:
    simulated(
        """
        import os, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        kept = [alloc(MIB) for _ in range(10)]
        for end in ("return", "exit"):
            child = os.fork()
            if child == 0:
                for address in kept:
                    free(address)
                gpumemx.memory_info(0), gpumemx.memory_summary(0), gpumemx.clear_cache(0)
                with gpumemx.monitor("child"):
                    pass
                try:
                    alloc(MIB)
                    os._exit(9)
                except RuntimeError:
                    pass
                if end == "exit":
                    os._exit(0)
                raise SystemExit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert gpumemx.memory_info(0).live == 10 * MIB
        for address in kept:
            free(address)
        assert gpumemx.memory_info(0).live == 0
        """
    )


def test_a_forked_child_ends_well_under_load() -> None:
    simulated(
        """
        import os, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        stop = False
        def work():
            while not stop:
                free(alloc(3 * MIB))
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads: t.start()
        mine = alloc(MIB)
        for _ in range(50):
            child = os.fork()
            if child == 0:
                free(mine)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop = True
        for t in threads: t.join()
        """
    )


def test_no_runtime_of_ours_is_loaded() -> None:
    # torch brings the CUDA runtime; the driver is opened by whoever uses a device.
    assert (
        output(
            """
            import torch
            before = {l.split()[-1] for l in open("/proc/self/maps") if ".so" in l}
            from gpumemx import _adapter
            _adapter.load()
            after = {l.split()[-1] for l in open("/proc/self/maps") if ".so" in l}
            new = {path.rsplit("/", 1)[-1] for path in after - before}
            print(sorted(name for name in new if "cuda" in name.replace("torch", "")))
            """
        )
        == "[]\n"
    )
