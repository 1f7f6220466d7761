# SPDX-License-Identifier: BSD-3-Clause
"""What the package says about itself: the version, the stubs, its public names."""

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import gpumemx
import pytest
from gpumemx import _core


def test_the_version_is_written_once(root: Path) -> None:
    version = (root / "VERSION").read_text().strip()
    assert version == metadata.version("gpumemx")
    assert version == gpumemx.__version__
    assert version == _core.__version__
    assert version == _core.build_info()["version"]


def test_the_build_says_what_is_in() -> None:
    info = _core.build_info()
    assert list(info) == [
        "version",
        "compiler",
        "build_type",
        "sanitizers",
        "paranoid",
        "cuda_driver",
        "cuda",
        "torch_adapter",
        "torch",
        "torch_cuda",
    ]
    assert (info["cuda"] is not None) == info["cuda_driver"]
    # A torch without CUDA, or an old one, is seen but has no adapter.
    assert isinstance(info["torch_adapter"], bool)
    assert not info["torch_adapter"] or info["torch"] is not None


def test_every_public_name_is_there() -> None:
    for name in gpumemx.__all__:
        assert getattr(gpumemx, name) is not None
        assert name in dir(gpumemx)
    assert callable(gpumemx.replay)
    with pytest.raises(AttributeError, match="module 'gpumemx' has no attribute 'reply'"):
        gpumemx.reply  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, gpumemx\n"
        "print(*sorted({'numpy', 'torch', 'rich', 'gpumemx._core'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def modules_of(code: str) -> set[str]:
    """Return gpumemx's own modules, and others that cost a millisecond, that the code imports."""
    script = (
        "import runpy, sys\n" + code + "\nothers = {'argparse', 'json', 'importlib.metadata', "
        "'subprocess', 'numpy', 'rich', 'pynvml', 'torch'}\n"
        "print(*(m for m in sys.modules if m in others or m.startswith('gpumemx')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_a_program_pays_for_no_module_that_it_does_not_use() -> None:
    package = {"gpumemx", "gpumemx.errors", "gpumemx.monitor", "gpumemx._adapter"}
    package |= {"gpumemx._device"}
    assert modules_of("import gpumemx") == package
    # A torch that has no error of its own and starts no CUDA will do.
    with_torch = "import types; sys.modules['torch'] = types.ModuleType('torch'); import gpumemx"
    assert modules_of(with_torch) == {*package, "torch", "gpumemx.allocator"}
    run = "sys.argv[1:] = ['run', '--help']\nfrom gpumemx.__main__ import main\nmain()"
    assert modules_of(run) == {*package, "gpumemx.__main__", "gpumemx._run", "gpumemx.allocator"}


def test_the_stub_says_what_the_module_has(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    allowed = tmp_path / "allowed"
    # Its metaclass is pybind11's, which has no stub. (Members have names of their own.)
    allowed.write_text("gpumemx._core.Replay\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "gpumemx._core", "--allowlist", str(allowed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
