# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the adapter share: whether there is one, and programs as processes.

Most tests run a program: torch's allocator can be replaced once in a process, and what is looked at
is often how the process ends.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

GIB = 1 << 30
MIB = 1 << 20


def why_no_adapter() -> str:
    """Return why the adapter cannot be tested here, or ''."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    from gpumemx import _adapter
    from gpumemx.errors import InstallError

    try:
        _adapter.load()
    except InstallError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def adapter() -> None:
    """Skip without an adapter, or fail where GPUMEMX_REQUIRE_TORCH asks for one."""
    reason = why_no_adapter()
    if not reason:
        return
    if os.environ.get("GPUMEMX_REQUIRE_TORCH") == "1":
        pytest.fail(f"GPUMEMX_REQUIRE_TORCH=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def require_device() -> None:
    """Skip without an adapter and a device, or fail where GPUMEMX_REQUIRE_GPU asks for them."""
    reason = why_no_adapter()
    if not reason:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a machine without a device, and of other packages
            import torch

            reason = "" if torch.cuda.is_available() else "there is no CUDA device"
    if not reason:
        return
    if os.environ.get("GPUMEMX_REQUIRE_GPU") == "1":
        pytest.fail(f"GPUMEMX_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def require_devices(count: int) -> None:
    """Skip with fewer devices, or fail where GPUMEMX_REQUIRE_GPUS asks for so many."""
    reason = why_no_adapter()
    if not reason:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch

            found = torch.cuda.device_count()
            reason = "" if found >= count else f"there are {found} CUDA devices of {count}"
    if not reason:
        return
    wanted = os.environ.get("GPUMEMX_REQUIRE_GPUS", "0")
    if int(wanted) >= count:
        pytest.fail(f"GPUMEMX_REQUIRE_GPUS={wanted}, but {reason}", pytrace=False)
    pytest.skip(reason)


def clean_environment(**changed: str) -> dict[str, str]:
    """Return the environment without what would change an allocator, and with `changed`."""
    dropped = ("GPUMEMX_CONF", "GPUMEMX_DISABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, **changed}


def python(
    *arguments: Any, cwd: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env=clean_environment(**environment),
    )


def program(text: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python program; indentation that all its lines share does not count."""
    return python("-c", textwrap.dedent(text), **environment)


def output(text: str, **environment: str) -> str:
    """Run a Python program that has to succeed in silence, and return what it prints."""
    done = program(text, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


# gpumemx over two simulated devices of 8 GiB.
SIMULATED = """
import gpumemx, torch
from gpumemx import _adapter
adapter = _adapter.load()
adapter.install("", {}, simulated_devices=2, simulated_bytes=8 << 30)
MIB, GIB = 1 << 20, 1 << 30
def alloc(size, device=0, stream=1):
    return adapter._sim_alloc(device, size, stream)
free = adapter._sim_free
"""


def simulated(text: str, **environment: str) -> str:
    """Run a program after SIMULATED; return what it prints."""
    return output(SIMULATED + textwrap.dedent(text), **environment)
