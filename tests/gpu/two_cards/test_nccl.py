# SPDX-License-Identifier: BSD-3-Clause
"""NCCL on two devices: random collectives while memory moves, and memory that NCCL registers.

Each test is a program of two ranks, which can be run by itself with --help.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "python"))

from torch_tools import clean_environment, require_devices  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    require_devices(2)


def ranks(script: str, *arguments: str, **environment: str) -> str:
    # What the machine asks of NCCL is in the environment, and stays.
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=clean_environment(**environment),
    )
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_random_collectives() -> None:
    ranks("random_collectives.py", "--count", "1000", "--seed", "11")


# NCCL registers every device allocation with each communicator then; mapped memory, which moves,
# must not be (torch switches it off itself with its expandable segments).
HOOK = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}


def test_the_hook_that_registers_all_memory() -> None:
    ranks("random_collectives.py", "--count", "600", "--seed", "12", **HOOK)


def test_the_hook_in_plain_mode() -> None:
    """Nothing moves there. One thread: NCCL's registration is not made for two at a time."""
    arguments = ("--count", "600", "--seed", "13", "--still", "--no-thread")
    ranks("random_collectives.py", *arguments, GPUMEMX_CONF="mode:plain", **HOOK)


@pytest.mark.parametrize("kind", ["ordinary", "whole", "nccl", "left"])
def test_collectives_on_registered_pools(kind: str) -> None:
    ranks("registered_pools.py", kind)
