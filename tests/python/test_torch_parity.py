# SPDX-License-Identifier: BSD-3-Clause
"""The parity run of tools/torch_parity.py, over a made-up folder of tests: no torch, no device."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# What "installs" here, and how a test tells.
INSTALL = "import builtins; builtins.parity_installed = True"

FIRST = """
import builtins, subprocess, sys, unittest
import pytest

here = hasattr(builtins, "parity_installed")

class TestMemory(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.fail("on both sides")
    def test_only_native(self): assert not here, "it is installed"
    def test_only_gpumemx(self): assert here
    def test_left_out_gemm(self): pass
    @unittest.skip("always")
    def test_skipped(self): pass

    def test_programs_that_it_starts_install_too(self):
        there = "import builtins; print(hasattr(builtins, 'parity_installed'))"
        said = subprocess.run([sys.executable, "-c", there], capture_output=True, text=True)
        assert said.stdout == f"{here}\\n"

@pytest.mark.parametrize("path", ["a::b/c.py"])
def test_odd_name(path): pass

@pytest.fixture
def late():
    yield
    assert not here, "after the test"

def test_teardown(late): pass
"""

SECOND = """
import builtins, os

def test_a_passes(): pass

def test_crashes():
    if hasattr(builtins, "parity_installed"):
        os._exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small test/ of torch."""
    tests = tmp_path / "test"
    (tests / "inductor").mkdir(parents=True)
    (tests / "test_cuda.py").write_text(FIRST)
    (tests / "inductor" / "test_cudagraph_trees.py").write_text(SECOND)
    return tests


@pytest.fixture
def parity(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(root / "tools")
    return importlib.import_module("torch_parity")


def run(root: Path, *words: Any, status: int = 1) -> str:
    """Run the script and return what it printed."""
    script = root / "tools" / "torch_parity.py"
    done = subprocess.run(
        [sys.executable, script, "--workers", "2", "--install", INSTALL, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def row(text: str, name: str) -> list[int]:
    """Return the figures of a row of the table."""
    found = re.search(rf"^{re.escape(name)} +(\d+) +(\d+)$", text, re.MULTILINE)
    assert found, text
    return [int(figure) for figure in found.groups()]


CARDS = """
import builtins, os, unittest

class TestCudaMultiGPU(unittest.TestCase):
    def test_only_native(self):
        assert not hasattr(builtins, "parity_installed")
    def test_sees_all_devices(self):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == "4,5"

class CommTest(unittest.TestCase):
    def test_reduces(self): pass
    def test_intra_node_comm(self): pass

class LargeCommTest(unittest.TestCase):
    def test_more_devices(self): pass

class NcclUserBufferRegistrationTest(unittest.TestCase):
    def test_multicast(self): pass
"""


@pytest.mark.slow
def test_what_needs_two_devices(
    root: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (folder / "distributed").mkdir()
    (folder / "test_cuda_multigpu.py").write_text(CARDS)
    (folder / "distributed" / "test_c10d_nccl.py").write_text(CARDS)
    text = run(root, folder, "--cards", "--out", tmp_path / "out")
    assert row(text, "test_cuda_multigpu.TestCudaMultiGPU") == [2, 1]
    assert row(text, "distributed.test_c10d_nccl.TestCudaMultiGPU") == [2, 1]
    assert row(text, "distributed.test_c10d_nccl.CommTest") == [1, 1]
    assert row(text, "all") == [6, 4]  # none of test_cuda.py, and no test for multicast
    run(root, folder, "--cards", "--devices", "0,1", status=2)


@pytest.mark.slow
def test_what_gpumemx_loses_is_named_and_fails(root: Path, folder: Path, tmp_path: Path) -> None:
    text = run(root, folder, "--devices", "0,1", "--out", tmp_path / "out", "--verbose")
    assert row(text, "test_cuda.TestMemory") == [3, 2]
    assert row(text, "test_cuda") == [2, 1]
    assert row(text, "inductor.test_cudagraph_trees") == [2, 1]
    assert row(text, "all") == [7, 4]
    assert "gpumemx: 3 tests again, each alone: 0 passed" in text
    lost = [line for line in text.splitlines() if line.startswith("lost ")]
    assert len(lost) == 3
    crash = "ran when pytest ended"
    assert lost[0] == f"lost inductor.test_cudagraph_trees::test_crashes: failed: {crash}"
    assert lost[1].startswith("lost test_cuda.TestMemory::test_only_native: failed: AssertionError")
    assert lost[2].startswith("lost test_cuda::test_teardown: failed: AssertionError: after")
    assert "\n1 pass only under gpumemx\n" in text
    assert "gained test_cuda.TestMemory::test_only_gpumemx: under native failed" in text
    assert text.endswith("\n4 of 7 that pass under native pass under gpumemx\n")

    native = json.loads((tmp_path / "out" / "native.json").read_text())
    assert native["outcomes"]["test_cuda::test_odd_name[a::b/c.py]"] == "passed"
    assert native["outcomes"]["test_cuda.TestMemory::test_skipped"] == "skipped"
    assert native["errors"]["test_cuda.TestMemory::test_fails"] == "AssertionError: on both sides"
    assert not any("gemm" in key for key in native["outcomes"])
    assert (tmp_path / "out" / "native.xml").exists()
    assert "test_fails" in (tmp_path / "out" / "native.log").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["inductor", "test_cuda.py"]


@pytest.mark.slow
def test_what_fails_only_after_another_is_not_lost(root: Path, folder: Path) -> None:
    (folder / "test_cuda.py").write_text(
        "import builtins\n"
        "ran = []\n"
        "def test_a(): ran.append(1)\n"
        "def test_b(): assert not (ran and hasattr(builtins, 'parity_installed'))\n"
    )
    words = (folder, "test_cuda.py", "--workers", "1")
    text = run(root, *words, status=0)
    assert "gpumemx: 1 tests again, each alone: 1 passed" in text
    assert text.endswith("\n2 of 2 that pass under native pass under gpumemx\n")
    assert "lost test_cuda::test_b" in run(root, *words, "--again", "0")


@pytest.mark.slow
def test_what_fails_alone_on_native_too_is_unsteady(root: Path, folder: Path) -> None:
    (folder / "test_cuda.py").write_text(
        "import builtins\n"
        "installed = hasattr(builtins, 'parity_installed')\n"
        "ran = []\n"
        "def test_a(): ran.append(1)\n"
        "def test_b(): assert not installed\n"
        "def test_c(): assert ran and not installed\n"
    )
    text = run(root, folder, "test_cuda.py", "--workers", "1")
    assert "gpumemx: 2 tests again, each alone: 0 passed" in text
    assert "\nlost test_cuda::test_b: failed" in text
    assert "lost test_cuda::test_c" not in text
    assert "\nunsteady, fails alone on native too: test_cuda::test_c: failed" in text
    assert text.endswith("\n1 of 3 that pass under native pass under gpumemx\n")


@pytest.mark.slow
def test_recorded_outcomes_stand_for_native(root: Path, folder: Path, tmp_path: Path) -> None:
    name = "test_cuda.TestMemory::test_passes"
    recorded = {name: "passed", "test_cuda_trace.TestTrace::test": "passed"}
    file = tmp_path / "native.json"
    file.write_text(json.dumps({"outcomes": recorded}))
    text = run(root, folder, "--native", file, "test_cuda.py", status=0)
    assert text.endswith("\n1 of 1 that pass under native pass under gpumemx\n")
    # A test that has gone is lost, unless the selection asks for others.
    recorded["test_cuda.TestMemory::test_x"] = "passed"
    file.write_text(json.dumps({"outcomes": recorded}))
    text = run(root, folder, "test_cuda.py", "--native", file)
    assert "lost test_cuda.TestMemory::test_x: not collected" in text
    run(root, folder, "--native", file, "-k", "test_passes", "test_cuda.py", status=0)
    text = run(root, folder, "--native", file, "-k", "test_skipped", "test_cuda.py")
    assert "nothing to compare" in text


@pytest.mark.slow
def test_a_side_that_reaches_its_limit_keeps_what_ran(root: Path, folder: Path) -> None:
    (folder / "test_cuda.py").write_text("def test_passes(): pass\ndef test_y(): pass\n")
    slow = "import time\ndef test_waits(): time.sleep(60)\ndef test_later(): time.sleep(60)\n"
    (folder / "inductor" / "test_cudagraph_trees.py").write_text(slow)
    text = run(root, folder, "--only", "native", "--limit", "5", status=0)
    assert "native: stopped at the limit" in text
    assert text.endswith("\n2 passed, 0 failed, 0 skipped, 2 not run\n")


@pytest.mark.slow
def test_an_installation_that_fails_does_not_pass_for_gpumemx(root: Path, folder: Path) -> None:
    text = run(root, folder, "--only", "gpumemx", "--install", "import no_such_module")
    assert "No module named 'no_such_module'" in text
    assert text.endswith("\n0 passed, 0 failed, 0 skipped, 0 not run\n")


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_does_not_stop_the_others(root: Path, folder: Path) -> None:
    (folder / "test_cuda.py").write_text("import no_such_module\n")
    text = run(root, folder, "--only", "native", status=0)
    error = "ModuleNotFoundError: No module named 'no_such_module'"
    assert f"native: test_cuda not imported: {error}\n" in text
    assert f"failed test_cuda::(collection): failed: {error}\n" in text
    assert text.endswith("\n2 passed, 1 failed, 0 skipped, 0 not run\n")


def test_what_only_native_can_pass_is_listed_apart(
    parity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(parity.NATIVE_ONLY, "a::x", "it asks for the name native")
    native = {"a::x": "passed", "a::y": "passed"}
    assert parity.report(native, parity.Results({"a::x": "failed", "a::y": "passed"})) == 0
    text = capsys.readouterr().out
    assert "native only a::x: it asks for the name native\n" in text
    assert "lost" not in text
    assert text.endswith("\n1 of 2 that pass under native pass under gpumemx\n")
    assert parity.report(native, parity.Results({"a::x": "passed", "a::y": "passed"})) == 0
    assert "it passes now, strike it" in capsys.readouterr().out


def test_few_tests_may_be_for_native_alone(
    parity: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(parity, "NATIVE_ONLY", {f"a::{i}": "" for i in range(13)})
    monkeypatch.setattr(sys, "argv", ["torch_parity.py", os.fspath(folder)])
    with pytest.raises(SystemExit, match="NATIVE_ONLY has 13 tests, 12 go"):
        parity.main()


def test_wrong_arguments_are_said(root: Path, folder: Path) -> None:
    wrong = [["no_such.py"], ["--native", "x", "--only", "native"], ["--devices", "0,1,2"]]
    for words in wrong:
        run(root, folder, *words, status=1 if words == ["no_such.py"] else 2)
