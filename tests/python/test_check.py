# SPDX-License-Identifier: BSD-3-Clause
"""``gpumemx check``: what is here, and whether gpumemx can work."""

import platform
import re
from pathlib import Path

import gpumemx
import pytest
from torch_tools import clean_environment, output, python


def check(**environment: str) -> tuple[int, str]:
    done = python("-m", "gpumemx", "check", **environment)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_without_a_device_it_says_so_and_fails() -> None:
    status, text = check(CUDA_VISIBLE_DEVICES="")
    assert status == 1
    lines = text.splitlines()
    assert lines[0].split() == ["gpumemx", gpumemx.__version__]
    assert lines[1].split()[:2] == ["Python", f"{platform.python_version()},"]
    assert "PyTorch" in text
    assert lines[-1].startswith("can't work here: ")
    assert "there is no CUDA device that this process can use" in text
    assert not any(line.endswith(" ") for line in lines)


def test_the_settings_are_shown_with_their_source() -> None:
    _, text = check(GPUMEMX_CONF="cap:2GiB", PYTORCH_ALLOC_CONF="expandable_segments:True")
    rows = [line.split(maxsplit=3) for line in text.splitlines()]
    assert ["cap", "2GiB", "from", "GPUMEMX_CONF"] in rows
    assert ["expandable_segments", "True", "from", "PYTORCH_ALLOC_CONF"] in rows
    assert ["mode", "virtual", "from", "default"] in rows


def test_a_wrong_setting_is_a_reason() -> None:
    status, text = check(GPUMEMX_CONF="capp:2GiB", GPUMEMX_NO="1")
    assert status == 1
    assert "can't work here: GPUMEMX_CONF: there is no setting 'capp'" in text
    assert "can't work here: environment variable GPUMEMX_NO means nothing to gpumemx" in text


def test_disabled_is_said() -> None:
    assert "GPUMEMX_DISABLE is set" in check(GPUMEMX_DISABLE="1")[1]


def test_a_missing_torch_is_a_reason(tmp_path: Path) -> None:
    # A folder on the path before the packages, whose torch says that it is not there.
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    path = [str(tmp_path), *filter(None, [clean_environment().get("PYTHONPATH")])]
    status, text = check(PYTHONPATH=":".join(path))
    assert status == 1
    assert "can't work here: PyTorch is not installed in this Python environment" in text


@pytest.mark.torch
@pytest.mark.usefixtures("adapter")
def test_the_adapter_that_fits_is_named() -> None:
    _, text = check()
    version = output("import torch\nprint(torch.__version__)").strip()
    name = "_torch_" + "_".join(version.split(".")[:2])
    row = next(line for line in text.splitlines() if line.startswith("adapter"))
    assert row.split()[1] == f"{name},"
    assert version in text


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.usefixtures("adapter")
def test_with_a_device_it_works() -> None:
    if output("import torch\nprint(torch.cuda.is_available())").strip() != "True":
        import os

        if os.environ.get("GPUMEMX_REQUIRE_GPU") == "1":
            pytest.fail("GPUMEMX_REQUIRE_GPU=1, but there is no device")
        pytest.skip("there is no device")
    status, text = check()
    assert status == 0, text
    assert re.search("virtual memory +yes, pages of 2.00 MiB", text), text
    assert text.splitlines()[-1] == "gpumemx works here."
