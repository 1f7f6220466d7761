# SPDX-License-Identifier: BSD-3-Clause
"""What NVML knows of the cards: their memory, who uses it, and which of them CUDA shows as which.

Everything here raises `Unavailable` with one sentence where NVML does not answer, whatever the
reason: no library, no package, an old driver, a container, a card that tells nothing. Callers say
"unknown" then. NVML is started at the first question and needs no CUDA.

Which card CUDA calls 0 is for CUDA to say. Once it has started its own UUIDs are taken; before,
CUDA_VISIBLE_DEVICES is read as the driver reads it (`visible`). NVML's indices are used for nothing
but listing.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


class Unavailable(Exception):  # noqa: N818  # the reason is what it is for
    """NVML does not tell. The text is the reason, without a full stop."""


@dataclass(frozen=True)
class GpuProcess:
    """One process that uses a device."""

    pid: int
    name: str
    """Of its program; empty where it is not known."""
    bytes: int | None
    """Of the device's memory; None where NVML does not tell."""

    def __str__(self) -> str:
        return f"{self.name or 'a process'} (pid {self.pid})"


@dataclass(frozen=True)
class Card:
    """A GPU of the machine, in the order of the PCI bus."""

    uuid: str
    name: str = ""
    migs: tuple[str, ...] | None = None
    """UUIDs of its MIG devices; None: MIG is off."""


# --- the library

_mu = threading.Lock()
_started_in = 0  # the process in which nvmlInit() has succeeded


def _nvml() -> ModuleType:
    global _started_in
    try:
        import pynvml
    except ImportError:
        raise Unavailable("the package nvidia-ml-py is not installed") from None
    with _mu:
        # A forked child has to start it anew.
        if _started_in != os.getpid():
            _call(pynvml.nvmlInit)
            _started_in = os.getpid()
    module: ModuleType = pynvml
    return module


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except Exception as error:  # NVMLError of many kinds, and what old packages raise instead
        raise Unavailable(f"NVML: {str(error) or type(error).__name__}") from None


def _ask(name: str, *arguments: Any, **named: Any) -> Any:
    nvml = _nvml()
    function = getattr(nvml, name, None)
    if function is None:
        raise Unavailable(f"the package nvidia-ml-py has no {name}()")
    return _call(function, *arguments, **named)


def _text(value: str | bytes) -> str:  # bytes in packages before 11.5
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# --- which card is which


def cards() -> list[Card]:
    """Return the machine's cards, whether or not this process may use them."""
    found = []
    for index in range(_ask("nvmlDeviceGetCount")):
        handle = _ask("nvmlDeviceGetHandleByIndex", index)
        uuid = _text(_ask("nvmlDeviceGetUUID", handle))
        found.append(Card(uuid, _text(_ask("nvmlDeviceGetName", handle)), _migs(handle)))
    return found


def _migs(handle: Any) -> tuple[str, ...] | None:
    try:
        if not _ask("nvmlDeviceGetMigMode", handle)[0]:
            return None
        count = _ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    except Unavailable:  # this card has no MIG
        return None
    found = []
    for index in range(count):
        try:
            mig = _ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            found.append(_text(_ask("nvmlDeviceGetUUID", mig)))
        except Unavailable:  # nothing in this place
            continue
    return tuple(found)


def visible(text: str | None, cards: Sequence[Card], *, by_bus: bool = False) -> list[str]:
    """Return the UUIDs of the devices that CUDA shows, in its order.

    Parameters
    ----------
    text
        What CUDA_VISIBLE_DEVICES says; None: it is not set.
    cards
        The machine's, in the order of the PCI bus.
    by_bus
        Whether CUDA_DEVICE_ORDER is PCI_BUS_ID. Otherwise CUDA puts the fastest card first, which
        only CUDA knows.

    Raises
    ------
    Unavailable
        The order depends on which of several different cards is the fastest.

    Notes
    -----
    As the driver and torch have it: a list is of numbers or of UUIDs, each of which may be cut
    short as long as it means one device. It ends before the first entry that means none (-1 is a
    common one); an entry that is there twice leaves no device at all. A card with MIG on stands for
    its first MIG device, and CUDA shows one of those and nothing else.
    """
    if text is not None and text.strip().startswith(("GPU-", "MIG-")):
        chosen = _by_uuid(text.strip(), cards)
    else:
        numbers = list(range(len(cards))) if text is None else _numbers(text)
        chosen = []
        for number in numbers:
            if number >= len(cards):
                break
            card = cards[number]
            if card.migs is not None and not card.migs:
                continue  # MIG is on, and nothing was made of it
            chosen.append(card.migs[0] if card.migs else card.uuid)
        if numbers and not by_bus and len({card.name for card in cards}) > 1:
            raise Unavailable(
                "which of several different cards CUDA puts first is not known before it starts "
                "(CUDA_DEVICE_ORDER=PCI_BUS_ID makes it the order of nvidia-smi)"
            )
    first_mig = next((uuid for uuid in chosen if uuid.startswith("MIG-")), None)
    return chosen if first_mig is None else [first_mig]


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for entry in text.split(","):
        found = re.match(r"\s*(\+?\d+)", entry)  # as strtoul() does: "1gpu" is 1
        if found is None:
            break
        number = int(found[1])
        if number in numbers:
            return []
        numbers.append(number)
    return numbers


def _by_uuid(text: str, cards: Sequence[Card]) -> list[str]:
    kind = text[:4]
    if kind == "GPU-":
        known = [card.uuid for card in cards]
    else:
        known = [mig for card in cards for mig in card.migs or ()]
    chosen: list[str] = []
    for entry in map(str.strip, text.split(",")):
        meant = match(entry, known) if entry.startswith(kind) else []
        if len(meant) != 1:
            break
        if meant[0] in chosen:
            return []
        chosen.append(meant[0])
    if kind == "GPU-":
        first = {card.uuid: card.migs[0] for card in cards if card.migs}
        chosen = [first.get(uuid, uuid) for uuid in chosen]
    return chosen


def match(prefix: str, uuids: Sequence[str]) -> list[str]:
    """Return the UUIDs that `prefix` may mean; a whole one means itself."""
    if prefix in uuids:
        return [prefix]
    return [uuid for uuid in uuids if uuid.startswith(prefix)]


def visible_here() -> list[str]:
    """Return the UUIDs of the devices that CUDA will show in this process, once it starts."""
    return visible(
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        cards(),
        by_bus=os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
    )


def handle_of(index: int) -> Any:
    """Return NVML's handle of the device that CUDA calls `index`."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        uuids = visible_here()
        if index >= len(uuids):
            raise Unavailable(f"CUDA_VISIBLE_DEVICES shows {len(uuids)} device(s)")
        return _ask("nvmlDeviceGetHandleByUUID", uuids[index])
    properties = cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    for kind in ("GPU-", "MIG-") if uuid is not None else ():
        try:
            return _ask("nvmlDeviceGetHandleByUUID", f"{kind}{uuid}")
        except Unavailable:
            continue
    bus = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    handle = _ask("nvmlDeviceGetHandleByPciBusId", "{:08X}:{:02X}:{:02X}.0".format(*bus))
    if _migs(handle) is not None:
        raise Unavailable("NVML does not find this MIG device")
    return handle


# --- what it tells of a card


def memory(handle: Any) -> tuple[int, int]:
    """Return a card's total and free memory, as CUDA counts them where NVML tells enough."""
    version = getattr(_nvml(), "nvmlMemory_v2", None)
    if version is not None:
        try:
            info = _ask("nvmlDeviceGetMemoryInfo", handle, version=version)
            return int(info.total) - int(info.reserved), int(info.free)
        except Unavailable:  # older drivers
            pass
    info = _ask("nvmlDeviceGetMemoryInfo", handle)
    return int(info.total), int(info.free)


def processes(handle: Any) -> list[GpuProcess]:
    """Return who uses a card, this process among them if NVML knows it; the largest first."""
    found: dict[int, int | None] = {}
    for process in _ask("nvmlDeviceGetComputeRunningProcesses", handle):
        found[int(process.pid)] = _bytes(process)
    # Processes that draw, and clients of MPS, are in lists of their own, which not all cards have.
    # One that does both is in two.
    for name in (
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses",
    ):
        try:
            more = _ask(name, handle)
        except Unavailable:
            continue
        for process in more:
            pid, size = int(process.pid), _bytes(process)
            known = found.get(pid)
            found[pid] = size if known is None else max(known, size or 0)
    both = [GpuProcess(pid, _name(pid), size) for pid, size in found.items()]
    return sorted(both, key=lambda process: (-(process.bytes or 0), process.pid))


def _bytes(process: Any) -> int | None:
    size = process.usedGpuMemory
    # Where the driver does not know it is None, or the largest number.
    return None if size is None or not 0 <= int(size) < 1 << 63 else int(size)


def _name(pid: int) -> str:
    try:
        text = _text(_ask("nvmlSystemGetProcessName", pid))
    except Unavailable:
        try:
            text = Path(f"/proc/{pid}/comm").read_text(errors="replace")
        except OSError:
            return ""
    words = text.split()
    return Path(words[0]).name if words else ""
