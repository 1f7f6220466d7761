# SPDX-License-Identifier: BSD-3-Clause
"""Out of memory on simulated devices: the report of an error, its figures, holders and dumps."""

from pathlib import Path

import gpumemx
import pytest
from gpumemx.oom import OomReport
from torch_tools import GIB, MIB, SIMULATED, output, program, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]

FAIL = """
def fails(size, **options):
    try:
        alloc(size, **options)
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError(f"{size} bytes were there")
def adds_up(r):
    assert r.exact and r.device_known, r
    assert r.total == r.reserved + r.others + r.free == 8 * GIB, r
    assert r.reserved == r.live + r.pending + r.cached + r.held, r
"""


def failing(text: str, **environment: str) -> str:
    import textwrap

    return simulated(FAIL + textwrap.dedent(text), **environment)


def test_each_error_has_its_own_report() -> None:
    failing(
        """
        kept = alloc(6 * GIB)
        assert gpumemx.last_oom() is None
        others = alloc(5 * GIB, device=1)
        first, second = fails(3 * GIB), fails(4 * GIB, device=1)
        assert (first.report.device, first.report.requested) == (0, 3 * GIB)
        assert (second.report.device, second.report.requested) == (1, 4 * GIB)
        assert first.report.live == 6 * GIB and second.report.live == 5 * GIB
        assert gpumemx.last_oom() == second.report
        free(kept)
        third = fails(9 * GIB)
        assert first.report.live == 6 * GIB and third.report.live == 0
        assert gpumemx.last_oom() == third.report == gpumemx.OomReport.of(third)
        for error in (first, second, third):
            adds_up(error.report)
            assert str(error).endswith(f"(report {error.report.id})"), error
            assert error.report.text in str(error)
            assert error.report.to_dict()["cause"] == error.report.cause
        """
    )


def test_the_last_ones_are_kept() -> None:
    failing(
        """
        kept = alloc(6 * GIB)
        errors = [fails(3 * GIB + i * 512) for i in range(300)]
        assert [e.report.exact for e in errors] == [False] * 44 + [True] * 256
        assert errors[44].report.requested == 3 * GIB + 44 * 512
        """
    )


def test_full() -> None:
    failing(
        """
        kept = [alloc(GIB) for _ in range(8)]
        r = fails(100 * MIB).report
        adds_up(r)
        assert (r.cause, r.live, r.free, r.cached) == ("full", 8 * GIB, 0, 0), r
        assert r.advice == "" and r.holders == ()
        assert "Cause: full. Tried to allocate 100.00 MiB. The memory in use fills" in r.text
        assert str(r).splitlines() == [
            "GPU 0 could not serve 100.00 MiB: full",
            "  device    8.00 GiB = 8.00 GiB reserved here + 0 B others + 0 B free",
            "  reserved  8.00 GiB = 8.00 GiB live + 0 B pending + 0 B cached + 0 B held",
        ], str(r)
        """
    )


def test_capped_by_a_setting() -> None:
    failing(
        """
        kept = alloc(3 * GIB)
        r = fails(2 * GIB).report
        adds_up(r)
        assert (r.cause, r.cap) == ("capped", 4 * GIB), r
        assert r.cap_source == "cap:4GiB in PYTORCH_ALLOC_CONF", r.cap_source
        assert "The cap was set by cap:4GiB in PYTORCH_ALLOC_CONF." in r.text
        assert r.advice == "A cap of 5.00 GiB would have let it pass."
        assert r.text.count(r.advice) == 1
        assert "4.00 GiB, set by cap:4GiB in PYTORCH_ALLOC_CONF" in str(r)
        # It would, and one that the device has no room for is not proposed.
        assert fails(6 * GIB).report.advice == ""
        """,
        PYTORCH_ALLOC_CONF="gpumemx_cap:4GiB",
    )


def test_capped_by_torchs_fraction() -> None:
    failing(
        """
        kept = alloc(1 * GIB)
        torch._C._cuda_setMemoryFraction(0.25, 0)
        r = fails(2 * GIB).report
        assert (r.cause, r.cap) == ("capped", 2 * GIB), r
        assert r.cap_source == "torch's memory fraction of 0.25 for this process"
        torch._C._cuda_setMemoryFraction(3 / 8, 0)
        assert r.advice == "A cap of 3.00 GiB would have let it pass."
        alloc(2 * GIB)
        """
    )


def test_nonsense() -> None:
    failing(
        """
        r = fails(130674 * GIB).report
        assert (r.cause, r.advice, r.requested) == ("nonsense size", "", 130674 * GIB), r
        adds_up(r)
        """
    )


def test_held_by_pools() -> None:
    failing(
        """
        pool = (0, 101)
        adapter._sim_create_pool(0, pool, None)
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        blocks = [alloc(2 * GIB) for _ in range(3)]
        torch._C._cuda_endAllocateToPool(0, pool)
        for block in blocks: free(block)
        r = fails(4 * GIB).report
        adds_up(r)
        assert (r.cause, r.live, r.in_private_pools) == ("held by pools", 0, 6 * GIB), r
        assert r.held == 6 * GIB and r.free == 2 * GIB, r
        assert r.advice == "CUDA graphs that never run at the same time can share one pool."
        """
    )


def test_during_a_capture() -> None:
    failing(
        """
        # In plain mode making room means to free, which a capture does not allow.
        free(alloc(6 * GIB))
        stream, graph = adapter._sim_new_stream(0), (7, 0)
        adapter._sim_begin_capture(0, graph, [stream])
        try:
            adapter._sim_alloc_on(0, 4 * GIB, stream)
            raise AssertionError
        except torch.OutOfMemoryError as error:
            r = error.report
        assert r.cause == "during a capture", r
        assert r.advice == "Run the work once before it is captured, so that its memory is there."
        adds_up(r)
        """,
        PYTORCH_ALLOC_CONF="gpumemx_mode:plain",
    )


def test_fragmented_in_plain_mode_has_advice_and_in_virtual_mode_passes() -> None:
    text = """
        blocks = [alloc(512 * MIB) for _ in range(16)]
        for i in range(0, 16, 2):
            free(blocks[i])
        """
    failing(text + "alloc(3 * GIB)\n")
    failing(
        """
        # Segments that hold four blocks each: two of them are of no use to a larger request.
        blocks = [alloc(5 * MIB) for _ in range(8 * GIB // (5 * MIB))]
        for i in range(0, len(blocks), 2):
            free(blocks[i])
        r = fails(2 * GIB).report
        adds_up(r)
        assert r.cause == "fragmented", r
        assert r.held >= 2 * GIB, r
        assert r.advice == "mode:virtual, the default, maps memory where it is needed."
        """,
        PYTORCH_ALLOC_CONF="gpumemx_mode:plain",
    )


def test_holders_with_a_history() -> None:
    (first, second, rest) = output(
        SIMULATED
        + FAIL
        + """
def small():
    kept = []
    for _ in range(3): kept.append(adapter._sim_alloc(0, 100 * MIB, 1))
    return kept
def large():
    return adapter._sim_alloc(0, int(1.5 * GIB), 1)
before = alloc(GIB)
adapter._sim_record_history()
kept = [small(), large(), large(), small()]
free(large())
error = fails(4 * GIB)
holders = error.report.holders
for holder in holders[:2]:
    print(holder)
print(len(holders), sum(h.bytes for h in holders) == gpumemx.memory_info(0).live - GIB)
assert "Most is held by " + holders[0].site + " (3.00 GiB in 2 blocks)" in str(error), error
"""
    ).splitlines()
    assert first.endswith(" large: 3.00 GiB in 2 block(s)"), first
    assert second.endswith(" small: 600.00 MiB in 6 block(s)"), second
    assert rest == "2 True"


def test_of_many_holders_the_five_largest_are_told() -> None:
    site = "def site_{0}(): return adapter._sim_alloc(0, {0}00 * MIB, 1)\n"
    sites = "".join(site.format(n) for n in range(1, 8))
    calls = ", ".join(f"site_{n}()" for n in (3, 7, 1, 6, 2, 5, 4))
    printed = output(
        SIMULATED
        + FAIL
        + sites
        + f"""
adapter._sim_record_history()
kept = [{calls}]
error = fails(7 * GIB)
for holder in error.report.holders:
    print(holder.site.split()[-1], holder.bytes // MIB, holder.blocks)
assert str(error.report).count("site_") == 5, str(error.report)
"""
    )
    assert printed.splitlines() == [f"site_{n} {100 * n} 1" for n in (7, 6, 5, 4, 3)]


def test_a_failed_request_is_in_the_trace() -> None:
    failing(
        """
        kept = alloc(6 * GIB)
        adapter._sim_record_history()
        fails(3 * GIB)
        (entry,) = torch._C._cuda_memorySnapshot(None)["device_traces"][0]
        assert (entry["action"], entry["size"]) == ("oom", 3 * GIB), entry
        """
    )


def test_a_number_of_snapshots_is_written(tmp_path: Path) -> None:
    done = program(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from torch_tools import SIMULATED
        exec(SIMULATED); exec({FAIL!r})
        try:
            gpumemx.dump_on_oom("x", most=0)
            raise AssertionError
        except ValueError as error:
            assert "most is 1 or more" in str(error)
        gpumemx.dump_on_oom({str(tmp_path / "new" / "folder")!r}, most=2)
        kept = alloc(6 * GIB)
        errors = [fails(3 * GIB) for _ in range(4)]
        print(*(error.report.id for error in errors[:2]))
        gpumemx.dump_on_oom(None)
        fails(3 * GIB)
        """
    )
    assert done.returncode == 0, done.stderr
    names = [f"oom_{id.replace('-', '_')}.pickle" for id in done.stdout.split()]
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [file.name for file in files] == sorted(names)
    assert done.stderr.count("ran out of memory; a snapshot is in") == 2
    assert gpumemx.analyze(files[0]).devices[0].live_now == 6 * GIB


def test_a_snapshot_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    done = program(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from torch_tools import SIMULATED
        exec(SIMULATED); exec({FAIL!r})
        gpumemx.dump_on_oom({str(folder)!r})
        import os; os.rmdir({str(folder)!r})
        assert fails(9 * GIB).report.cause == "nonsense size"
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"no snapshot was written to {folder}/oom_")


def test_dumps_need_gpumemx() -> None:
    with pytest.raises(gpumemx.InstallError, match="call install_allocator"):
        gpumemx.dump_on_oom("folder")


# --- errors of torch's own allocator

TORCH = (
    "CUDA out of memory. Tried to allocate {}. GPU 1 has a total capacity of 8.00 GiB of which "
    "{} is free. Including non-PyTorch memory, this process has 1.00 GiB memory in use. {}"
    "Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting ..."
)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (("2.00 GiB", "512.00 MiB", "", "7.00 GiB", "100.00 MiB"), "full"),
        (("2.00 GiB", "512.00 MiB", "", "3.50 GiB", "3.00 GiB"), "fragmented"),
        (("2.00 GiB", "512.00 MiB", "4.00 GiB allowed; ", "3.50 GiB", "16.00 MiB"), "capped"),
        (("2.00 GiB", "512.00 MiB", "", "1.00 GiB", "16.00 MiB"), "other users"),
        (("130674.00 GiB", "512.00 MiB", "", "1.00 GiB", "16.00 MiB"), "nonsense size"),
        (("20.00 MiB", "512.00 MiB", "", "1.00 GiB", "16.00 MiB"), "refused by the driver"),
    ],
)
def test_torchs_own_errors_are_read_as_far_as_they_go(said: tuple[str, ...], cause: str) -> None:
    import torch

    gpumemx._adapter.attach_report(torch)
    error = torch.OutOfMemoryError(TORCH.format(*said))
    r = error.report  # type: ignore[attr-defined]
    assert isinstance(r, OomReport)
    assert (r.cause, r.device, r.exact, r.id, r.advice) == (cause, 1, False, "", "")
    assert (r.total, r.free) == (8 * GIB, 512 * MIB)
    assert r.total == r.reserved + r.others + r.free
    assert r.reserved == r.live + r.cached
    assert r.text == str(error)


def test_an_error_that_says_nothing_has_no_report() -> None:
    assert OomReport.of(RuntimeError("CUDA error: misaligned address")) is None
    assert OomReport.of(RuntimeError("CUDA out of memory. Tried to allocate more than 1EB")) is None
    bare = OomReport.of(RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    assert bare is not None
    assert (bare.cause, bare.requested, bare.device_known) == ("unknown", 20 * MIB, False)
    assert "  device    unknown" in str(bare)


def test_the_property_is_there_when_torch_came_first() -> None:
    assert (
        output(
            """
        import torch, gpumemx
        first = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        second = torch.cuda.OutOfMemoryError("anything")
        print(first.report.cause, second.report, gpumemx.last_oom())
        """
        )
        == "unknown None None\n"
    )


def test_other_processes_are_told_by_name() -> None:
    failing(
        f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from fake_nvml import FakeCard, NVMLError, put_in_place
        adapter._sim_take(0, 5 * GIB)
        kept = alloc(2 * GIB)
        error = fails(3 * GIB)
        card = FakeCard("GPU-0", processes=[(os.getpid(), 3 * GIB), (4711, 4 * GIB), (4712, None)])
        machine = put_in_place(card, FakeCard("GPU-1"))
        machine.names[4711] = "/usr/bin/python3 serve.py"
        r = error.report
        adds_up(r)
        assert (r.cause, r.others) == ("other users", 5 * GIB), r
        assert [(p.pid, p.name, p.bytes) for p in r.processes][0] == (4711, "python3", 4 * GIB), r
        assert "  process   python3 (pid 4711): 4.00 GiB" in str(r), str(r)
        assert "(pid 4712): an unknown amount" in str(r), str(r)
        # Asked once, however often the report is looked at.
        card.processes = []
        assert error.report == r == gpumemx.last_oom()
        """,
        CUDA_VISIBLE_DEVICES="0,1",
    )


def test_nvml_that_fails_hides_no_error() -> None:
    failing(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from fake_nvml import FakeCard, FakeNvml, NVMLError, put_in_place
        adapter._sim_take(0, 5 * GIB)
        kept = alloc(2 * GIB)
        for broken in (NVMLError("Not Supported"), OSError("libnvidia-ml.so.1"), AssertionError()):
            for name in FakeNvml.FUNCTIONS:
                put_in_place(FakeCard("GPU-0", processes=[(7, GIB)])).broken[name] = broken
                error = fails(3 * GIB)
                r = error.report
                adds_up(r)
                assert r.cause == "other users" and r.processes == (), r
                assert "  processes unknown (" in str(r), str(r)
        sys.modules["pynvml"] = None
        assert "nvidia-ml-py is not installed" in str(fails(3 * GIB).report)
        """,
        CUDA_VISIBLE_DEVICES="0",
    )
