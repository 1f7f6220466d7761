# SPDX-License-Identifier: BSD-3-Clause
"""Where a device's memory is, and giving back what is cached."""

from dataclasses import asdict, dataclass
from typing import Any

from gpumemx import _adapter
from gpumemx._device import Device, device_index, no_device


@dataclass(frozen=True)
class MemoryInfo:
    """One device's memory at one moment, in bytes.

    ``total = reserved + others + free`` and ``reserved = live + pending + cached + held``. Where
    the device could not be asked (`device_known` is False) `total`, `others` and `free` are 0.
    """

    device: int
    """Index of the device."""
    allocator: str
    """Whose figures these are: ``gpumemx``, ``torch`` (its own allocator) or ``none``."""
    total: int = 0
    """The card's memory."""
    free: int = 0
    """What the driver could still hand out."""
    others: int = 0
    """All that this allocator did not reserve: contexts, libraries, other processes."""
    reserved: int = 0
    """What the allocator has taken from the card."""
    live: int = 0
    """In tensors, rounded up to 512 B each."""
    pending: int = 0
    """Freed, but another stream may still use it."""
    cached: int = 0
    """Unused: serves new requests, and `clear_cache` gives it back."""
    held: int = 0
    """Unused, but tied to something in use, so it cannot be given back."""
    largest_free: int = 0
    """The largest block that is ready, of any stream; 0 with torch's own allocator."""
    cap: int | None = None
    """The most that this process may reserve, or None."""
    device_known: bool = False
    note: str = ""
    """Why there are no figures, or what they leave out; empty when nothing is to be said."""

    def __str__(self) -> str:
        if self.allocator == "none":
            return f"GPU {self.device}: {self.note}"
        parts = ", ".join(f"{part} {_size(getattr(self, part))}" for part in _PARTS)
        text = f"GPU {self.device}, {self.allocator}: reserved {_size(self.reserved)} ({parts})"
        if self.device_known:
            text += f"; others {_size(self.others)}, free {_size(self.free)} of {_size(self.total)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Released:
    """What `clear_cache` gave back and, by reason, what stayed. Bytes."""

    device: int
    released: int = 0
    """Given back to the card."""
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

    @property
    def stayed(self) -> dict[str, int]:
        """Bytes by reason, the reasons without any left out."""
        reasons = {name: getattr(self, name) for name in ("live", "held", "pending", "pools")}
        return {name: size for name, size in reasons.items() if size}

    def __str__(self) -> str:
        return f"GPU {self.device}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_PARTS = ("live", "pending", "cached", "held")
_TORCH_NOTE = (
    "figures of torch's own allocator: with its expandable segments, held memory counts as cached"
)
_LATE = "CUDA has not started: nothing is allocated"


def memory_info(device: Device = None) -> MemoryInfo:
    """Say where a device's memory is.

    Parameters
    ----------
    device
        Index, name or ``torch.device``. Default: the current device, or 0 before CUDA has started.

    Returns
    -------
    MemoryInfo
        All zeros, with a note, without a device, without PyTorch or before CUDA has started.

    Raises
    ------
    IndexError
        CUDA has started and has no such device.
    ValueError, TypeError
        `device` is no CUDA device.

    Notes
    -----
    Starts no CUDA and imports no torch. Asks the driver for the card's free memory (some
    microseconds); does not wait for the device. Any thread, but not inside a CUDA graph's capture.

    Examples
    --------
    >>> import gpumemx
    >>> i = gpumemx.memory_info(0)
    >>> i.reserved == i.live + i.pending + i.cached + i.held
    True
    """
    index = device_index(device)
    adapter, reason = _adapter.current()
    if adapter is None:
        return MemoryInfo(index, "none", note=reason)
    f = adapter.memory_info(index)
    # Nothing known and nothing reserved: the device was not used by either allocator.
    if not f["device_known"] and f["reserved"] == 0:
        return MemoryInfo(index, "none", note=_why_nothing(adapter))
    ours = adapter.is_installed()
    return MemoryInfo(
        index,
        "gpumemx" if ours else "torch",
        total=f["device_total"],
        free=f["device_free"],
        others=f["others"],
        reserved=f["reserved"],
        live=f["live"],
        pending=f["pending"],
        cached=f["idle"] + f["idle_pending"],
        held=f["held"] + f["idle_private"],
        largest_free=f["largest_free"],
        cap=f["cap"],
        device_known=f["device_known"],
        note="" if ours else _TORCH_NOTE,
    )


def memory_summary(device: Device = None) -> str:
    """Write the same as a table of at most 72 columns and a sentence about the state.

    Parameters, errors and notes are those of `memory_info`. docs/reading-a-report.md explains every
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
    index = device_index(device)
    adapter, reason = _adapter.current()
    if adapter is None:
        return f"GPU {index}: {reason}."
    if not adapter.cuda_started() and no_device():
        return f"GPU {index}: {_NO_DEVICE}."
    return adapter.memory_summary(index).rstrip("\n")


def clear_cache(device: Device = None, *, wait: bool = True, collect: bool = False) -> Released:
    """Give unused memory back to the card.

    Parameters
    ----------
    device
        Index, name or ``torch.device``. Default: the current device.
    wait
        Wait for queued work that may still touch unused memory; else that memory stays.
    collect
        Run Python's garbage collector first, which frees tensors in reference cycles.

    Returns
    -------
    Released
        What came back, and what did not and why.

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
    >>> gpumemx.clear_cache(0).released >= 0
    True
    """
    index = device_index(device)
    if collect:
        import gc

        gc.collect()
    adapter, reason = _adapter.current()
    if adapter is None:
        return Released(index, text=f"nothing to give back: {reason}")
    if not adapter.cuda_started():
        return Released(index, text=f"nothing to give back: {_why_nothing(adapter)}")
    figures = adapter.clear_cache(index, wait).to_dict()
    return Released(
        index,
        released=figures["released"],
        live=figures["live"],
        held=figures["held"],
        pending=figures["pending"],
        pools=figures["pools"],
        text=figures["text"],
    )


_NO_DEVICE = "no CUDA device is visible to PyTorch"


def _why_nothing(adapter: _adapter.Adapter) -> str:
    if adapter.cuda_started():
        return "nothing was allocated on this device yet"
    return _NO_DEVICE if no_device() else _LATE


def _size(size: int) -> str:
    from gpumemx import _core

    return _core.format_bytes(size)
