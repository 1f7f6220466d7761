# SPDX-License-Identifier: BSD-3-Clause
"""GPU memory for PyTorch.

`install_allocator` makes gpumemx torch's CUDA allocator. `monitor`, `memory_info`,
`memory_summary` and `clear_cache` say and change what is in memory, with gpumemx's or torch's own
allocator. `recover`, `oom_guard` and `retry_on_oom` let a program go on after it ran out of memory.
`replay` says what a recorded run would have needed, `analyze` what a memory snapshot of
PyTorch tells, both without a GPU. The command line is ``gpumemx`` or ``python -m gpumemx``.

Importing it imports neither torch nor the compiled parts, and starts no CUDA.
"""

import sys
from typing import TYPE_CHECKING, Any

from gpumemx.errors import (
    GpumemxError,
    InstallError,
    MissingPackageError,
    RecoveryError,
    SettingError,
    TraceError,
)

# Now: its module has its name, and imported later would put itself in the function's place.
from gpumemx.monitor import GPUMonitor, monitor

if TYPE_CHECKING:
    from gpumemx._analyze import Analysis, analyze
    from gpumemx._replay import CardVerdict, ReplayResult, replay
    from gpumemx._version import __version__
    from gpumemx.allocator import Setting, install_allocator, is_installed, settings
    from gpumemx.behind import MemoryBehind, memory_behind
    from gpumemx.oom import OomHolder, OomReport, dump_on_oom, last_oom
    from gpumemx.pressure import MemoryPressure, PressureCallback, on_memory_pressure
    from gpumemx.recovery import Recovered, Retry, oom_guard, recover, retry_on_oom
    from gpumemx.summary import (
        GpuProcess,
        MemoryInfo,
        PoolMemory,
        Released,
        clear_cache,
        memory_info,
        memory_summary,
    )
    from gpumemx.trace import Trace, load_trace

__all__ = [  # noqa: RUF022  # in the order of the README
    "install_allocator",
    "is_installed",
    "settings",
    "Setting",
    "monitor",
    "GPUMonitor",
    "memory_info",
    "MemoryInfo",
    "PoolMemory",
    "GpuProcess",
    "memory_summary",
    "clear_cache",
    "Released",
    "last_oom",
    "OomReport",
    "OomHolder",
    "dump_on_oom",
    "on_memory_pressure",
    "MemoryPressure",
    "PressureCallback",
    "recover",
    "Recovered",
    "oom_guard",
    "retry_on_oom",
    "Retry",
    "memory_behind",
    "MemoryBehind",
    "replay",
    "ReplayResult",
    "CardVerdict",
    "load_trace",
    "Trace",
    "analyze",
    "Analysis",
    "GpumemxError",
    "InstallError",
    "SettingError",
    "RecoveryError",
    "TraceError",
    "MissingPackageError",
    "__version__",
]

# Found at first use: importing gpumemx stays cheap.
_MODULES = {
    "Analysis": "gpumemx._analyze",
    "analyze": "gpumemx._analyze",
    "install_allocator": "gpumemx.allocator",
    "is_installed": "gpumemx.allocator",
    "settings": "gpumemx.allocator",
    "Setting": "gpumemx.allocator",
    "MemoryInfo": "gpumemx.summary",
    "PoolMemory": "gpumemx.summary",
    "GpuProcess": "gpumemx.summary",
    "memory_info": "gpumemx.summary",
    "memory_summary": "gpumemx.summary",
    "clear_cache": "gpumemx.summary",
    "Released": "gpumemx.summary",
    "last_oom": "gpumemx.oom",
    "OomReport": "gpumemx.oom",
    "OomHolder": "gpumemx.oom",
    "dump_on_oom": "gpumemx.oom",
    "on_memory_pressure": "gpumemx.pressure",
    "MemoryPressure": "gpumemx.pressure",
    "PressureCallback": "gpumemx.pressure",
    "recover": "gpumemx.recovery",
    "Recovered": "gpumemx.recovery",
    "oom_guard": "gpumemx.recovery",
    "retry_on_oom": "gpumemx.recovery",
    "Retry": "gpumemx.recovery",
    "MemoryBehind": "gpumemx.behind",
    "memory_behind": "gpumemx.behind",
    "CardVerdict": "gpumemx._replay",
    "ReplayResult": "gpumemx._replay",
    "replay": "gpumemx._replay",
    "__version__": "gpumemx._version",
    "Trace": "gpumemx.trace",
    "load_trace": "gpumemx.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpumemx' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:
    from gpumemx._adapter import attach_report
    from gpumemx.allocator import watch_cuda_start

    watch_cuda_start()
    attach_report(sys.modules["torch"])
