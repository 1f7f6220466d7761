# SPDX-License-Identifier: BSD-3-Clause
"""Where a device's memory is, and giving back what is cached."""

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, overload

from gpumemx import _adapter
from gpumemx._device import Device, SomeDevice, device_index
from gpumemx._memory import (
    MemoryInfo,
    PoolMemory,
    device_count,
    read,
    size_text,
    why_nothing,
)
from gpumemx._nvml import GpuProcess

__all__ = [
    "GpuProcess",
    "MemoryInfo",
    "PoolMemory",
    "Released",
    "clear_cache",
    "memory_info",
    "memory_summary",
]


@dataclass(frozen=True)
class Released:
    """What `clear_cache` gave back and, by reason, what stayed. Bytes."""

    device: int | None
    """Index of the device; None: all of `devices` together."""
    predicted: int = 0
    """What was to come back, told before anything was done. More or less comes when other threads
    allocate or free meanwhile; less when the driver refuses."""
    released: int = 0
    """Given back to the card."""
    workspaces: int = 0
    """Of cuBLAS's workspaces, dropped first; part of `released` as far as it came back."""
    live: int = 0
    """Stayed: in tensors, or freed while another stream may still use it."""
    held: int = 0
    """Stayed: unused, but on handles that something in use shares."""
    pending: int = 0
    """Stayed: unused, but work that is queued may still touch it (``wait=True`` waits for that)."""
    pools: int = 0
    """Stayed: in private pools that are in use."""
    text: str = ""
    """The same in words."""
    devices: tuple["Released", ...] = ()
    """One for each device, where all were asked for."""

    @property
    def stayed(self) -> dict[str, int]:
        """Bytes by reason, the reasons without any left out."""
        reasons = {name: getattr(self, name) for name in ("live", "held", "pending", "pools")}
        return {name: size for name, size in reasons.items() if size}

    def __str__(self) -> str:
        if self.devices:
            return "\n".join(map(str, self.devices))
        return self.text if self.device is None else f"GPU {self.device}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@overload
def memory_info() -> list[MemoryInfo]: ...
@overload
def memory_info(device: SomeDevice) -> MemoryInfo: ...
def memory_info(device: Device = None) -> MemoryInfo | list[MemoryInfo]:
    """Say where the memory of a device is, every byte by its cause.

    Parameters
    ----------
    device
        Index, name (``"cuda"`` is the current device), UUID (``"GPU-..."``, ``"MIG-..."``, also cut
        short) or ``torch.device``. Default: all that CUDA shows this process.

    Returns
    -------
    MemoryInfo or list of MemoryInfo
        One, or the list of all by index. A figure that cannot be had is None, with the reason in
        `MemoryInfo.unknown`. Before CUDA has started nothing is reserved, and NVML tells the rest.
        The list is never empty: without a device it has one of zeros, whose `note` says why.

    Raises
    ------
    IndexError
        CUDA has started and has no such device.
    ValueError, TypeError
        `device` is no CUDA device, or no UUID of one that this process sees.

    Notes
    -----
    Starts no CUDA, makes no context and imports no torch. Asks the allocator, the driver and NVML
    (the package nvidia-ml-py), which takes some tens of milliseconds for each device; does not wait
    for the device. Any thread, but not inside a CUDA graph's capture.

    Examples
    --------
    >>> import gpumemx
    >>> i = gpumemx.memory_info(0)
    >>> i.reserved == i.live + i.pending + i.cached + i.held
    True
    >>> i.total == i.reserved + i.others + i.free
    True
    >>> len(gpumemx.memory_info()) >= 1
    True
    """
    if device is not None:
        return read(device_index(device))
    return [read(index) for index in range(max(1, device_count()))]


def memory_summary(device: Device = None) -> str:
    """Write the same as a table of at most 72 columns and a sentence about the state.

    Parameters, errors and notes are those of `memory_info`, but that the default is the devices on
    which this process has memory, or all where it has none. docs/reading-a-report.md explains every
    line.

    Returns
    -------
    str
        Lines, without a newline at the end.

    Examples
    --------
    >>> import gpumemx
    >>> print(gpumemx.memory_summary(0))  # doctest: +ELLIPSIS
    GPU 0...
    """
    if device is not None:
        return _table(memory_info(device))
    every = memory_info()
    used = [info for info in every if info.reserved or info.context]
    return "\n\n".join(map(_table, used or every))


def clear_cache(
    device: Device = None,
    *,
    wait: bool = False,
    collect: bool = False,
    workspaces: bool = False,
) -> Released:
    """Give unused memory back to the card, and say what stays and why.

    Parameters
    ----------
    device
        As for `memory_info`. Default: all devices that torch's allocator has memory of.
    wait
        Wait for queued work that may still touch unused memory, and return when all of it is with
        the driver. Otherwise that memory stays, and nothing waits for the device.
    collect
        Run Python's garbage collector first, which frees tensors in reference cycles.
    workspaces
        First have torch drop the workspaces of cuBLAS, on all devices; the next matrix product
        takes one anew. Not while a CUDA graph exists that was captured on a stream with a workspace
        from before the capture: its replays would go on using it.

    Returns
    -------
    Released
        What was to come back (`predicted`), what came back, and what did not and why.

    Raises
    ------
    IndexError
        CUDA has started and has no such device.
    ValueError, TypeError
        `device` is no CUDA device.

    Notes
    -----
    Rarely makes a program faster or smaller: unused memory serves new requests. Useful before
    another process, or a library with an allocator of its own, needs the card. With torch's own
    allocator it is ``torch.cuda.empty_cache()``, which always waits and takes all devices.

    Examples
    --------
    >>> import gpumemx
    >>> gpumemx.clear_cache().released >= 0
    True
    """
    index = None if device is None else device_index(device)
    if collect:
        import gc

        gc.collect()
    adapter, reason = _adapter.current()
    if adapter is not None and not adapter.cuda_started():
        reason = why_nothing(adapter)
    if adapter is None or not adapter.cuda_started():
        return Released(index, text=f"nothing to give back: {reason}")
    dropped = _drop_workspaces(adapter, index) if workspaces else {}
    if index is not None:
        figures = adapter.clear_cache(index, wait).to_dict()
        return _released(index, figures, dropped.get(index, 0))
    devices = tuple(
        _released(index, trimmed.to_dict(), dropped.get(index, 0))
        for index, trimmed in adapter.clear_caches(wait)
    )
    names = ("predicted", "released", "workspaces", "live", "held", "pending", "pools")
    return Released(
        None,
        **{name: sum(getattr(one, name) for one in devices) for name in names},
        text="\n".join(map(str, devices)) or "nothing to give back: nothing is reserved",
        devices=devices,
    )


def _released(index: int, figures: _adapter.Trimmed, workspaces: int) -> Released:
    return Released(
        index,
        predicted=figures["predicted"],
        released=figures["released"],
        workspaces=workspaces,
        live=figures["live"],
        held=figures["held"],
        pending=figures["pending"],
        pools=figures["pools"],
        text=figures["text"],
    )


def _drop_workspaces(adapter: _adapter.Adapter, only: int | None) -> dict[int, int]:
    """Have torch drop them; return the bytes by device."""
    indices = range(device_count()) if only is None else (only,)

    def sizes() -> dict[int, int]:
        return {index: adapter.memory_report(index)["workspaces"] or 0 for index in indices}

    before = sizes()
    sys.modules["torch"]._C._cuda_clearCublasWorkspaces()
    after = sizes()
    return {index: max(0, before[index] - after[index]) for index in indices}


# --- the table

_WIDTH = 72
_MOST_PROCESSES = 6


def _table(info: MemoryInfo) -> str:
    if info.allocator == "none" and not info.device_known:
        return f"GPU {info.device}: {info.note}."
    head = f"GPU {info.device} memory"
    if info.allocator != "none":
        head += f", allocator {info.allocator}"
    if info.device_known:
        head += f", {size_text(info.total)} in all"
    lines = [head, *_lines(info)]
    for sentence in _sentences(info):
        lines += textwrap.wrap(sentence, _WIDTH)
    return "\n".join(lines)


def _lines(info: MemoryInfo) -> Iterator[str]:
    whole = info.total if info.device_known else info.reserved

    def line(name: str, size: int | None, meaning: str) -> str:
        amount = "unknown" if size is None else size_text(size)
        share = f"{100 * size / whole:5.1f} %" if size is not None and whole else ""
        return f"  {name:<13} {amount:>12} {share:>8}  {meaning}"[:_WIDTH].rstrip()

    def part(name: str, size: int | None, meaning: str) -> Iterator[str]:
        if size != 0:
            yield line(f"  {name}", size, meaning)

    yield line("live", info.live, "in tensors")
    yield from part("rounding", info.rounding, "up to 512 B a tensor")
    if info.allocator != "none":
        yield from part("workspaces", info.workspaces, "of cuBLAS, kept by torch")
    yield line("pending", info.pending, "freed, other streams still use it")
    for stream, size in info.pending_on.items():
        yield from part("stream", size, f"{stream:#x}" if stream else "the default stream")
    yield line("cached", info.cached, "can be given back")
    yield from part("waiting", info.waiting, "once queued work is done")
    yield line("held", info.held, "cached, tied to what is in use")
    meanings = {
        "live": "beside blocks in use",
        "pending": "beside pending blocks",
        "pools": "in private pools",
    }
    for holder, size in info.held_by.items():
        yield from part(f"by {holder}", size, meanings[holder])
    yield line("reserved", info.reserved, "= live + pending + cached + held")
    count = len(info.pools)
    yield from part("in pools", info.in_pools, f"in {count} private pool{'s' * (count > 1)}")
    if not info.device_known:
        yield "  others, free: unknown, the device was not asked"
        return
    yield line("others", info.others, "all that torch did not reserve")
    yield from part("earlier", info.earlier, "torch's own, before gpumemx")
    yield from part("context", info.context, "CUDA's of this process, kernels")
    yield from part("nccl", info.nccl, "by NCCL's communicators")
    yield from part("outside", info.outside, "by this process, not by torch")
    processes = info.processes
    if processes is None:
        yield line("  processes", None, "all but this one")
    for process in (processes or ())[:_MOST_PROCESSES]:
        yield line("  process", process.bytes, f"{process.name[:20] or '?'}, pid {process.pid}")
    if rest := (processes or ())[_MOST_PROCESSES:]:
        size = sum(process.bytes or 0 for process in rest)
        yield line("  processes", size, f"{len(rest)} more")
    yield from part("unexplained", info.unexplained, "see the docs")
    yield line("free", info.free, "what the driver can hand out")


def _sentences(info: MemoryInfo) -> Iterator[str]:
    if info.state:
        yield info.state
    # One reason often explains several figures.
    reasons: dict[str, list[str]] = {}
    for name, reason in info.unknown.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield f"Unknown: {', '.join(names)} ({reason})."
    if info.note:
        note = info.note[0].upper() + info.note[1:]
        yield note if note.endswith(".") else f"{note}."
