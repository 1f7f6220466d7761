# SPDX-License-Identifier: BSD-3-Clause
"""``gpumemx check``: what is here, what gpumemx would use, and whether it can work."""

import importlib
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpumemx import _adapter
from gpumemx._version import __version__
from gpumemx.errors import GpumemxError

if TYPE_CHECKING:
    from types import ModuleType

    from gpumemx.allocator import Setting


@dataclass
class Report:
    """What was found, in the order in which it is printed."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    settings: "list[Setting]" = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why gpumemx cannot work here; empty when it can."""


def check() -> Report:
    """Look at this environment. Starts CUDA on each device, to see what really works."""
    report = Report()
    add = report.rows.append
    add(("gpumemx", __version__))
    add(("Python", f"{platform.python_version()}, {sys.executable}"))
    torch = _torch(report)
    if torch is not None:
        _adapter_row(report, torch)
    add(("driver", _driver_version(torch)))
    _devices(report, torch)
    _settings(report)
    return report


def _torch(report: Report) -> "ModuleType | None":
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        text = _adapter.NO_TORCH if missing else f"PyTorch cannot be imported: {error}"
        report.rows.append(("PyTorch", "not installed" if missing else "cannot be imported"))
        report.problems.append(text)
        return None
    report.rows.append(("PyTorch", str(torch.__version__)))
    report.rows.append(("its CUDA", str(torch.version.cuda or "none")))
    return torch


def _adapter_row(report: Report, torch: "ModuleType") -> None:
    there = _adapter.modules_there()
    try:
        adapter = _adapter.find(torch)
    except GpumemxError as error:
        report.rows.append(("adapter", f"none fits (there are: {', '.join(there) or 'none'})"))
        report.problems.append(str(error))
        return
    name = _adapter.module_name(str(torch.__version__))
    report.rows.append(("adapter", f"{name}, compiled against {adapter.torch_version}"))
    if adapter.version != __version__:
        report.problems.append(
            f"the adapter is of gpumemx {adapter.version}; install gpumemx again"
        )


def _driver_version(torch: "ModuleType | None") -> str:
    parts = []
    with suppress(OSError):
        parts.append(Path("/sys/module/nvidia/version").read_text().strip())
    if torch is not None and torch.version.cuda is not None:
        try:
            number = int(torch._C._cuda_getDriverVersion())
        except Exception:  # there is none
            number = 0
        if number:
            parts.append(f"up to CUDA {number // 1000}.{number % 1000 // 10}")
    return ", ".join(parts) or "none found"


def _devices(report: Report, torch: "ModuleType | None") -> None:
    from gpumemx import _core

    count = 0
    if torch is not None:
        try:
            count = int(torch.cuda.device_count())
        except Exception:  # a driver that is too old, or a warning made an error
            count = 0
    if torch is None or count == 0:
        try:
            _core.probe_device(0)
        except RuntimeError as error:
            report.rows.append(("GPUs", f"none ({error})"))
            report.problems.append("there is no CUDA device that this process can use")
        else:
            report.rows.append(("GPUs", "there is one, but PyTorch cannot use it"))
            if torch is not None:
                report.problems.append("PyTorch sees no CUDA device")
        return
    usable = 0
    for index in range(count):
        try:
            facts = _core.probe_device(index)
            name = torch.cuda.get_device_name(index)
        except Exception as error:
            report.rows.append((f"GPU {index}", f"cannot be used: {error}"))
            continue
        usable += 1
        size = _core.format_bytes(facts["total"])
        free = _core.format_bytes(facts["free"])
        report.rows.append((f"GPU {index}", f"{name}, {size}, {free} free"))
        if facts["virtual_memory"]:
            memory = f"yes, pages of {_core.format_bytes(facts['granularity'])}"
            handles = "POSIX file descriptor" if facts["exportable"] else "of this process only"
        else:
            memory = "no: ordinary device allocations are used (as with mode:plain)"
            handles = "none"
        report.rows.append(("  virtual memory", memory))
        report.rows.append(("  handles", handles))
    if usable == 0:
        report.problems.append("none of the CUDA devices can be used")


def _settings(report: Report) -> None:
    from gpumemx import _core
    from gpumemx.allocator import settings

    report.problems.extend(_core.unknown_environment(list(os.environ)))
    try:
        report.settings = settings()
    except GpumemxError as error:
        report.problems.append(str(error))


def check_command() -> int:
    """Print the report; return the exit status of ``gpumemx check``."""
    report = check()
    for what, found in report.rows:
        print(f"{what:<18}{found}")
    if report.settings:
        print("\nSettings")
    width = max((len(s.key) for s in report.settings), default=0)
    for s in report.settings:
        print(f"  {s.key:<{width}}  {s.value:<10} from {s.source}")
    print()
    disabled = os.environ.get("GPUMEMX_DISABLE", "").strip().lower() not in _OFF
    if disabled:
        print("GPUMEMX_DISABLE is set: install_allocator() leaves torch's own allocator.")
    for problem in report.problems:
        print(f"can't work here: {problem}")
    if not report.problems:
        print("gpumemx works here.")
    return 1 if report.problems else 0


_OFF = ("", "0", "false", "off", "no")
