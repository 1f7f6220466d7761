# SPDX-License-Identifier: BSD-3-Clause
"""The examples of examples/python run, on a CPU and in their smallest form."""

import re
from pathlib import Path

import pytest
from torch_tools import python

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "python").glob("*.py"))


def losses(example: Path, *arguments: str) -> list[float]:
    done = python(
        example,
        *("--device", "cpu", "--tiny", "--steps", "2", "--batch", "2", "--print-losses"),
        *("--deterministic", *arguments),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^\d+\.\d+ steps/s$", done.stdout, re.MULTILINE)
    return [float.fromhex(x) for x in re.findall(r"^loss \d+ (\S+)$", done.stdout, re.MULTILINE)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_and_without_gpumemx(example: Path) -> None:
    without = losses(example)
    assert len(without) == 2
    assert all(0 < loss < 100 for loss in without)
    assert losses(example, "--gpumemx") == without


def test_there_are_three() -> None:
    assert len(EXAMPLES) == 3
