# SPDX-License-Identifier: BSD-3-Clause
"""The part of NVML that is asked, over cards that a test makes up, in the place of pynvml."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml's: its text is the driver's."""


@dataclass
class FakeCard:
    uuid: str
    name: str = "NVIDIA H200"
    total: int = 8 * GIB
    free: int = 8 * GIB
    reserved: int = 0
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    """Process ids and their bytes."""
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    migs: "list[FakeCard] | None" = None
    bus: str = ""


class FakeNvml(ModuleType):
    """The module. `broken` are the functions that fail, and what they raise."""

    nvmlMemory_v2 = 2  # noqa: N815
    NVMLError = NVMLError

    FUNCTIONS = (
        "nvmlInit",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetHandleByPciBusId",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
        "nvmlSystemGetProcessName",
    )

    def __init__(self, cards: list[FakeCard]) -> None:
        super().__init__("pynvml")
        self.cards = cards
        self.names: dict[int, str] = {}
        self.broken: dict[str, Exception] = {}
        self.called: list[str] = []
        for name in self.FUNCTIONS:
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.called.append(name)
            if name in self.broken:
                raise self.broken[name]
            return getattr(self, f"_{name}")(*arguments, **named)

        return call

    def _nvmlInit(self) -> None:  # noqa: N802
        pass

    def _nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        return self.cards[index]

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:  # noqa: N802
        for card in self.cards:
            for one in (card, *(card.migs or ())):
                if one.uuid == uuid:
                    return one
        raise NVMLError("Not Found")

    def _nvmlDeviceGetHandleByPciBusId(self, bus: str) -> FakeCard:  # noqa: N802
        for card in self.cards:
            if card.bus == bus:
                return card
        raise NVMLError("Not Found")

    def _nvmlDeviceGetUUID(self, card: FakeCard) -> str:  # noqa: N802
        return card.uuid

    def _nvmlDeviceGetName(self, card: FakeCard) -> str:  # noqa: N802
        return card.name

    def _nvmlDeviceGetMigMode(self, card: FakeCard) -> tuple[int, int]:  # noqa: N802
        return (card.migs is not None, card.migs is not None)

    def _nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:  # noqa: N802
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(  # noqa: N802
        self, card: FakeCard, index: int
    ) -> FakeCard:
        if card.migs is None or index >= len(card.migs):
            raise NVMLError("Not Found")
        return card.migs[index]

    def _nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:  # noqa: N802
        if version is None:
            return SimpleNamespace(total=card.total + card.reserved, free=card.free)
        return SimpleNamespace(
            total=card.total + card.reserved, reserved=card.reserved, free=card.free
        )

    def _nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes]

    def _nvmlDeviceGetGraphicsRunningProcesses(self, card: FakeCard) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.graphics]

    def _nvmlDeviceGetMPSComputeRunningProcesses(self, card: FakeCard) -> list[Any]:  # noqa: N802
        raise NVMLError("Not Supported")

    def _nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802
        if pid not in self.names:
            raise NVMLError("Not Found")
        return self.names[pid]


def put_in_place(*cards: FakeCard) -> FakeNvml:
    """Make it what ``import pynvml`` finds."""
    from gpumemx import _nvml

    module = FakeNvml(list(cards))
    sys.modules["pynvml"] = module
    _nvml._started_in = 0
    return module
