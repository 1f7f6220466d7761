# SPDX-License-Identifier: BSD-3-Clause
"""Out of memory on a device: recovery from real errors, on gpumemx and on torch's own allocator.

python -m pytest tests/gpu/test_out_of_memory.py, with the built package on PYTHONPATH. Without a
device all of it is skipped; GPUMEMX_REQUIRE_GPU=1 makes that a failure. No program takes more than
a twentieth of the card, so that others may run beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "python"
sys.path.insert(0, str(TOOLS))

from torch_tools import program, require_device  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    require_device()


def run(text: str, ours: bool) -> str:
    import textwrap

    start = f"""
import logging, sys
sys.path.insert(0, {str(TOOLS)!r})
import gpumemx, torch
logging.getLogger("gpumemx").setLevel(logging.ERROR)
if {ours}: gpumemx.install_allocator()
MIB, GIB = 1 << 20, 1 << 30
def tensor(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
def cap():
    torch.cuda.set_per_process_memory_fraction(0.05)
    return torch.cuda.get_device_properties(0).total_memory // 20
"""
    done = program(start + textwrap.dedent(text))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


both = pytest.mark.parametrize("ours", [True, False], ids=["gpumemx", "torch"])


@both
def test_all_variants_are_recovered_from(ours: bool) -> None:
    run(
        """
        import oom_variants as variants
        variants.device = "cuda"
        for name, step in variants.VARIANTS.items():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            tried = []
            @gpumemx.retry_on_oom(batch_size=4)
            def train(batch_size):
                tried.append((variants.alive(), torch.cuda.memory_allocated() - before))
                step(batch_size > 1)
            train()
            assert tried == [(0, 0)] * 3, (name, tried)
            variants.forget_all()
        """,
        ours,
    )


@both
def test_a_batch_that_is_too_large_is_halved(ours: bool) -> None:
    run(
        """
        part = cap() // 7
        @gpumemx.retry_on_oom(batch_size=16)
        def train(batch_size):
            kept = []  # in a variable of the frame; the list of a comprehension goes with it
            for _ in range(batch_size):
                kept.append(tensor(part))
            return sum(t.numel() for t in kept)
        assert train() == 4 * part, train.retry
        # What the attempts that failed had is there again.
        assert train.retry.recovered.freed >= 6 * part, train.retry.recovered
        assert train() == 4 * part
        """,
        ours,
    )


def test_the_report_adds_up_and_each_error_has_its_own() -> None:
    run(
        """
        torch.cuda.memory._record_memory_history(stacks="python")
        def weights():
            return tensor(2 * GIB)
        kept = weights()
        def fails(size):
            try:
                tensor(size)
            except torch.OutOfMemoryError as error:
                return error
        total = torch.cuda.mem_get_info()[1]
        first, second = fails(total - GIB), fails(2 * total)
        for error in (first, second):
            r = error.report
            assert r.exact and r.total == total == r.reserved + r.others + r.free, r
            assert r.reserved == r.live + r.pending + r.cached + r.held, r
        assert (first.report.cause, second.report.cause) == ("full", "nonsense size"), first
        assert first.report.holders[0].bytes == 2 * GIB
        assert first.report.holders[0].site.endswith("tensor"), first.report.holders
        assert gpumemx.last_oom() == second.report
        cap()
        capped = fails(total // 10).report
        assert capped.cause == "capped" and "0.05" in capped.cap_source, capped
        """,
        ours=True,
    )


def test_functions_under_pressure_run_with_and_without_pythons_lock() -> None:
    run(
        """
        total = cap()
        kept = {}
        told = []
        def unload(pressure):
            told.append(pressure)
            kept.clear()
        gpumemx.on_memory_pressure(unload)
        for make in (tensor, lambda n: torch.UntypedStorage(n, device="cuda")):
            kept["a"] = tensor(total // 2)
            make(total * 6 // 10)
        assert [p.size for p in told] == [total * 6 // 10] * 2, told
        assert gpumemx.last_oom() is None
        """,
        ours=True,
    )


def test_a_snapshot_is_written(tmp_path: Path) -> None:
    run(
        f"""
        gpumemx.dump_on_oom({str(tmp_path)!r}, most=1)
        kept = tensor(GIB)
        for _ in range(2):
            try:
                tensor(torch.cuda.mem_get_info()[1])
            except torch.OutOfMemoryError:
                pass
        """,
        ours=True,
    )
    import gpumemx

    (file,) = tmp_path.iterdir()
    assert gpumemx.analyze(file).devices[0].live_now == 1 << 30
