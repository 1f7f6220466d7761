# SPDX-License-Identifier: BSD-3-Clause
"""What several test files share: the shipped traces, small traces, and the command as a process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_tools import adapter  # noqa: F401  # a fixture for all files

ROOT = Path(__file__).parents[2]
TRACES = sorted((ROOT / "examples" / "traces").glob("*.npz"))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(params=TRACES, ids=lambda path: path.stem)
def shipped(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="session")
def gnn() -> Path:
    """The shortest of the shipped traces."""
    return ROOT / "examples" / "traces" / "gnn_sampling.npz"


def arrays(**changed: Any) -> dict[str, Any]:
    """Return a small consistent trace: two blocks of 32 and 64 MiB on two streams."""
    mib = 1 << 20
    return {
        "op": np.array([0, 1, ~0, ~1], np.int64),
        "size": np.array([32 * mib, 64 * mib, 32 * mib, 64 * mib], np.int64),
        "stream": np.array([0, 1, 0, 1], np.int16),
        "time_us": np.array([0, 1000, 2000, 2000], np.int64),
        "slots": np.int64(2),
        **changed,
    }


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.npz"
    np.savez_compressed(path, **arrays())
    return path


def gpumemx(*args: Any, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "gpumemx", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
