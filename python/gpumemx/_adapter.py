# SPDX-License-Identifier: BSD-3-Clause
"""Finds the compiled adapter for the torch that is there: ``gpumemx._torch_<major>_<minor>``.

`load` imports torch and the adapter. `current` imports nothing that the program has not imported
itself: before a program has torch it has no CUDA tensors, and the answer to every question is 0.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypedDict, cast

from gpumemx.errors import InstallError


class Figures(TypedDict):
    """Where a device's bytes are; csrc/core/oom.hpp has the equations."""

    device_known: bool
    device_total: int
    device_free: int
    others: int
    cap: int | None
    reserved: int
    live: int
    pending: int
    held: int
    idle_pending: int
    idle_private: int
    idle: int
    largest_free: int


class Report(Figures):
    """The same by cause; csrc/core/memory_report.hpp and csrc/adapter/device_view.hpp."""

    live_requested: int
    in_private_pools: int
    workspaces: int | None
    earlier: int
    pending_on: dict[int, int]
    waiting_on: dict[int, int]
    held_by_live: int
    held_by_pending: int
    held_by_pools: int
    pools: list[tuple[tuple[int, int], bool, int, int]]
    releasable: int
    releasable_by_waiting: int
    state: str


class OomFigures(Figures):
    """One request that failed; csrc/monitor/oom_report.hpp."""

    id: str
    device: int
    cause: str
    rejected: bool
    requested: int
    block: int
    stream: int
    in_private_pools: int
    cap_source: str
    driver_said: str
    holders: list[tuple[str, int, int]]
    advice: str
    text: str


class Trimmed(TypedDict):
    predicted: int
    released: int
    live: int
    held: int
    pending: int
    pools: int
    wanted: int
    text: str


class ScopeFigures(TypedDict):
    before: int
    after: int
    peak: int
    allocations: int
    driver_calls: int
    driver_seconds: float


class Entry(TypedDict):
    key: str
    value: str
    source: str
    note: str


class TrimReport(Protocol):
    def to_dict(self) -> Trimmed: ...


class Scope(Protocol):
    @property
    def exact(self) -> bool: ...
    def read(self) -> ScopeFigures: ...
    def end(self) -> ScopeFigures: ...
    def report(self, name: str) -> str: ...


class Adapter(Protocol):
    """What each adapter module has; csrc/bindings/torch/module.cpp."""

    torch_version: str
    version: str

    def install(
        self,
        conf: str,
        arguments: dict[str, str],
        late: bool = False,
        simulated_devices: int = 0,
        simulated_bytes: int = 0,
    ) -> None: ...
    def is_installed(self) -> bool: ...
    def cuda_started(self) -> bool: ...
    def settings(self) -> list[Entry]: ...
    def settings_complaint(self) -> str: ...
    def memory_info(self, device: int) -> Figures: ...
    def memory_report(self, device: int) -> Report: ...
    def address_ranges(self) -> list[tuple[int, int]]: ...
    def clear_cache(self, device: int, wait: bool = False) -> TrimReport: ...
    def clear_caches(self, wait: bool = False) -> list[tuple[int, TrimReport]]: ...
    def oom_report(self, id: str) -> OomFigures | None: ...
    def last_oom(self) -> OomFigures | None: ...
    def on_out_of_memory(self, callback: Callable[[OomFigures], object]) -> None: ...
    def on_memory_pressure(
        self, callback: Callable[[int, int, int, int, int, int], bool]
    ) -> None: ...
    def memory_behind(
        self, address: int
    ) -> tuple[int, int, int, list[tuple[int, int]], bool, bool] | None: ...
    def paths(self, device: int) -> dict[str, int]: ...
    def Scope(self, device: int, from_start: bool = False) -> Scope: ...  # noqa: N802


NO_TORCH = "PyTorch is not installed in this Python environment"


def module_name(torch_version: str) -> str:
    """Return the module's name for a version of torch: ``_torch_2_14`` for ``2.14.1+cu130``."""
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    return "_torch_{}_{}".format(*numbers.groups()) if numbers else "_torch_unknown"


def modules_there() -> list[str]:
    """Return the names of the adapter modules that are installed."""
    here = [str(Path(__file__).parent)]
    return sorted(m.name for m in pkgutil.iter_modules(here) if m.name.startswith("_torch_"))


def find(torch: ModuleType) -> Adapter:
    """Return the adapter for an imported torch.

    Raises
    ------
    InstallError
        There is none that fits, or it cannot be loaded; the text is one sentence.
    """
    version = str(torch.__version__)
    name = module_name(version)
    full_name = f"gpumemx.{name}"
    if full_name in sys.modules:
        return cast(Adapter, sys.modules[full_name])
    if getattr(getattr(torch, "version", None), "cuda", None) is None:
        raise InstallError(f"this PyTorch ({version}) is built without CUDA")
    there = modules_there()
    if name not in there:
        has = ", ".join(m.removeprefix("_torch_").replace("_", ".") for m in there)
        raise InstallError(
            f"PyTorch is {version}, and this gpumemx has "
            + (f"adapters for {has} only" if there else "no adapter for any PyTorch")
            + ": install gpumemx again in this environment (pip install --force-reinstall "
            "--no-deps gpumemx, or pip install . in its checkout), which builds the one that fits"
        )
    try:
        adapter = cast(Adapter, importlib.import_module(full_name))
        attach_report(torch)
        return adapter
    except ImportError as error:
        raise InstallError(
            f"gpumemx's adapter for PyTorch {version} ({name}) cannot be loaded: {error}; "
            "install gpumemx again in this environment"
        ) from error


def attach_report(torch: ModuleType) -> None:
    """Give ``torch.OutOfMemoryError`` its property ``report``. Torch has it from 2.5 on."""
    kind = getattr(torch, "OutOfMemoryError", None)
    if kind is not None and not hasattr(kind, "report"):
        kind.report = property(_report, doc="Why the request failed: a gpumemx.OomReport.")


def _report(error: BaseException) -> object:
    from gpumemx.oom import OomReport  # only programs that run out of memory pay for it

    return OomReport.of(error)


def load() -> Adapter:
    """Import torch, if need be, and the adapter for it.

    Raises
    ------
    InstallError
        There is no torch, or no adapter for it.
    """
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InstallError(
            f"{NO_TORCH} ({sys.executable}): install it, then gpumemx again, which builds the "
            "adapter for it"
        ) from None
    return find(torch)


def current() -> tuple[Adapter | None, str]:
    """Return the adapter if the program uses torch, else None and why there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None, (NO_TORCH if find_spec("torch") is None else "PyTorch is not imported yet")
    # torch in a forked child: CUDA that has started before the fork cannot be asked.
    in_bad_fork = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
    if in_bad_fork is not None and in_bad_fork():
        return None, "this process was forked after CUDA had started, and cannot use it"
    try:
        return find(torch), ""
    except InstallError as error:
        return None, str(error)


def installed() -> Adapter | None:
    """Return the adapter if it is torch's allocator now. Imports nothing."""
    for name, module in list(sys.modules.items()):
        if name.startswith("gpumemx._torch_") and module is not None:
            adapter = cast(Adapter, module)
            if adapter.is_installed():
                return adapter
    return None
