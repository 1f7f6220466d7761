# SPDX-License-Identifier: BSD-3-Clause
"""Gathers where a device's memory is, from the four that know a part each.

The allocator knows what it has reserved, to the byte; the driver how much of the card is free, and
which addresses of this process have memory behind them; NCCL how much of that it holds; NVML how
much each process has taken. What none of them explains is a figure of its own. What one of them
does not tell is None, with the reason.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gpumemx import _adapter, _nccl, _nvml, _outside
from gpumemx._device import no_device
from gpumemx._nvml import GpuProcess, Unavailable


@dataclass(frozen=True)
class PoolMemory:
    """A private pool: of CUDA graphs, or a ``torch.cuda.MemPool``. Bytes."""

    id: tuple[int, int]
    """As torch has it (``MemPool.id``, ``CUDAGraph.pool()``)."""
    in_use: bool
    """False: nobody holds it any more, but some of its memory is in use."""
    reserved: int
    live: int


@dataclass(frozen=True)
class MemoryInfo:
    """One device's memory at one moment, in bytes.

    ``total = reserved + others + free``, ``reserved = live + pending + cached + held`` and ``others
    = earlier + context + nccl + outside + processes + unexplained``, to the byte; what is unknown
    (None) is part of `unexplained`, but an unknown `nccl` of `outside`. Where the device could not
    be asked (`device_known` is False) `total`, `others` and `free` are 0.
    """

    device: int
    """Index of the device."""
    allocator: str
    """Whose figures these are: ``gpumemx``, ``torch`` (its own allocator) or ``none``."""
    total: int = 0
    """The card's memory, as CUDA counts it."""
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
    requested: int = 0
    """Of `live`: what was asked for. The rest is `rounding`."""
    workspaces: int | None = None
    """Of `live`: of cuBLAS, kept by torch (``clear_cache(workspaces=True)`` drops them)."""
    pending_on: Mapping[int, int] = field(default_factory=dict)
    """`pending` by the stream that is waited for: its handle (``Stream.cuda_stream``), 0 for the
    default stream. Empty with torch's own allocator."""
    waiting: int = 0
    """Of `cached`: queued work may still touch it, so ``clear_cache(wait=True)`` is what gives it
    back."""
    waiting_on: Mapping[int, int] = field(default_factory=dict)
    """`waiting` by the stream of that work."""
    held_by: Mapping[str, int] = field(default_factory=dict)
    """`held` by what holds it: ``live`` blocks beside it, ``pending`` ones, or private
    ``pools``."""
    pools: tuple[PoolMemory, ...] = ()
    """The private pools."""
    in_pools: int = 0
    """Of `reserved`: in private pools, whatever its state."""
    releasable: int = 0
    """What `clear_cache` would give back now."""
    releasable_by_waiting: int = 0
    """What ``clear_cache(wait=True)`` would give back now."""
    earlier: int = 0
    """Of `others`: reserved by torch's own allocator before gpumemx was installed late."""
    context: int | None = None
    """Of `others`: this process's CUDA context: loaded kernels, stacks, the driver's own. What NVML
    counts for this process less all that it has allocated."""
    nccl: int | None = None
    """Of `others`: what NCCL holds for the communicators of ``torch.distributed``, as it counts
    itself (2.29.7 or later, with torch 2.12). 0 without a communicator on the device."""
    outside: int | None = None
    """Of `others`: what other code of this process has allocated from the driver itself
    (``cudaMalloc`` in extensions, buffers of cuBLAS and other libraries, communicators that torch
    does not know), and NCCL's where `nccl` is None."""
    processes: tuple[GpuProcess, ...] | None = None
    """Of `others`: the other processes on the card, the largest first."""
    unexplained: int = 0
    """Of `others`: what is left. Below 0 when others' memory has changed while it was read."""
    largest_free: int = 0
    """The largest block that is ready, of any stream; 0 with torch's own allocator."""
    cap: int | None = None
    """The most that this process may reserve, or None."""
    device_known: bool = False
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Why a figure is None or leaves something out, by its name."""
    note: str = ""
    """Why there are no figures, or what they leave out; empty when nothing is to be said."""
    state: str = ""
    """What is worth knowing about them, in a sentence."""

    @property
    def rounding(self) -> int:
        """Of `live`: what each request was rounded up by."""
        return self.live - self.requested

    @property
    def in_processes(self) -> int:
        """Sum over `processes`, as far as it is known."""
        return sum(process.bytes or 0 for process in self.processes or ())

    def __str__(self) -> str:
        text = f"GPU {self.device}"
        if self.allocator == "none":
            text += f": {self.note}"
        else:
            parts = ", ".join(f"{part} {size_text(getattr(self, part))}" for part in PARTS)
            text += f", {self.allocator}: reserved {size_text(self.reserved)} ({parts})"
        if self.device_known:
            text += (
                f"; others {size_text(self.others)}, free {size_text(self.free)} of "
                f"{size_text(self.total)}"
            )
        return text

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rounding": self.rounding}


PARTS = ("live", "pending", "cached", "held")
_TORCH_NOTE = (
    "These are torch's own figures; with its expandable segments, held memory counts as cached."
)
_LATE_NOTE = "Blocks from before the late installation belong to torch's own allocator: earlier."
_LATE = "CUDA has not started: nothing is allocated"
_NOT_USED = "nothing was allocated on this device yet"
NO_DEVICE = "no CUDA device is visible to PyTorch"


def size_text(size: int) -> str:
    from gpumemx import _core

    return _core.format_bytes(size) if size >= 0 else f"-{_core.format_bytes(-size)}"


def why_nothing(adapter: _adapter.Adapter) -> str:
    if adapter.cuda_started():
        return _NOT_USED
    return NO_DEVICE if no_device() else _LATE


def device_count() -> int:
    """Return how many devices CUDA shows this process, as far as is known before it starts."""
    adapter, _ = _adapter.current()
    if adapter is not None and adapter.cuda_started():
        count = 0
        try:
            while count < 64:
                adapter.memory_info(count)
                count += 1
        except IndexError:
            pass
        return count
    try:
        return len(_nvml.visible_here())
    except Unavailable:
        pass
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return 0 if cuda is None or no_device() else int(cuda.device_count())


def read(index: int) -> MemoryInfo:
    """Read one device's figures."""
    adapter, reason = _adapter.current()
    # All are asked one after the other. Where memory came or went meanwhile, once more.
    for _ in range(2):
        before = _reserved(adapter, index)
        info = _read_once(adapter, reason, index)
        if info.unexplained >= 0 and info.reserved == before == _reserved(adapter, index):
            break
    return info


def _reserved(adapter: _adapter.Adapter | None, index: int) -> int:
    return 0 if adapter is None else adapter.memory_info(index)["reserved"]


def _read_once(adapter: _adapter.Adapter | None, reason: str, index: int) -> MemoryInfo:
    driver = _outside.Driver.if_started()
    outside = _outside_allocations(driver, adapter)
    nccl = _nccl.Held() if driver is None else _nccl.held(index, driver)
    users, total, free = _ask_nvml(index)
    known: dict[str, Any] = {"device": index, "allocator": "none", "note": reason}
    if adapter is not None:
        known.update(_of_allocator(adapter, index))
    if not known.get("device_known") and total:
        known.update(device_known=True, total=total, free=free)
        known["others"] = total - free - known.get("reserved", 0)
    has_context = known.get("reserved", 0) > 0 or (driver is not None and driver.has_context(index))
    known.update(_of_others(known, index, users, outside, nccl, has_context))
    if known.get("reserved", 0) == 0 and (known["context"] or 0) > 0:
        known["note"] = (
            f"this process has a CUDA context there ({size_text(known['context'])}) and no tensor"
        )
    return MemoryInfo(**known)


def _of_allocator(adapter: _adapter.Adapter, index: int) -> dict[str, Any]:
    f = adapter.memory_report(index)
    # Nothing known and nothing reserved: the device was not used by either allocator.
    if not f["device_known"] and f["reserved"] == 0:
        return {"note": why_nothing(adapter)}
    ours = adapter.is_installed()
    late = _LATE_NOTE if f["earlier"] else ""
    return {
        "allocator": "gpumemx" if ours else "torch",
        "total": f["device_total"],
        "free": f["device_free"],
        "others": f["others"],
        "reserved": f["reserved"],
        "live": f["live"],
        "pending": f["pending"],
        "cached": f["idle"] + f["idle_pending"],
        "held": f["held"] + f["idle_private"],
        "requested": f["live_requested"],
        "workspaces": f["workspaces"],
        "pending_on": f["pending_on"],
        "waiting": f["idle_pending"],
        "waiting_on": f["waiting_on"],
        "held_by": {
            name: size
            for name in ("live", "pending", "pools")
            if (size := f[f"held_by_{name}"])  # type: ignore[literal-required]
        },
        "pools": tuple(PoolMemory(*pool) for pool in f["pools"]),
        "in_pools": f["in_private_pools"],
        "releasable": f["releasable"],
        "releasable_by_waiting": f["releasable_by_waiting"],
        "earlier": f["earlier"],
        "largest_free": f["largest_free"],
        "cap": f["cap"],
        "device_known": f["device_known"],
        "note": late if ours else _TORCH_NOTE,
        "state": f["state"],
    }


def _ask_nvml(index: int) -> tuple[list[GpuProcess] | str, int, int]:
    """Return the processes on a card, or why they are not known, and its total and free memory."""
    total = free = 0
    try:
        handle = _nvml.handle_of(index)
        with contextlib.suppress(Unavailable):
            total, free = _nvml.memory(handle)
        return _nvml.processes(handle), total, free
    except Unavailable as reason:
        return str(reason), total, free


def other_processes(index: int) -> tuple[tuple[GpuProcess, ...], str]:
    """Return the other processes on a card, and why they are not known. Raises nothing."""
    users, _, _ = _ask_nvml(index)
    if isinstance(users, str):
        return (), users
    own = os.getpid()
    if all(user.pid != own for user in users):
        return (), _FOREIGN
    return tuple(user for user in users if user.pid != own), ""


_FOREIGN = (
    "NVML does not list this process under its own id, as in containers with process ids of their "
    "own: which is which is not known"
)


def _outside_allocations(
    driver: _outside.Driver | None, adapter: _adapter.Adapter | None
) -> _outside.Found:
    if driver is None:  # no code of this process has started CUDA
        return _outside.Found()
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing():
        return _outside.Found(unknown="a CUDA graph is being captured")
    skip = adapter.address_ranges() if adapter is not None and adapter.cuda_started() else []
    return _outside.find(driver, [*skip, *_received()])


def _received() -> list[_outside.Range]:
    """Return where the CUDA tensors stand that other processes share with this one.

    torch's own allocator does not tell what it has opened, but torch.multiprocessing keeps a table.
    """
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    found = []
    # Other threads add to it: list() of a dict's items is one step for them.
    for key, reference in list(getattr(reductions, "shared_cache", {}).items()):
        if not (isinstance(key, tuple) and isinstance(key[0], bytes)):
            continue  # of the host, or sent from here
        storage = sys.modules["torch"].UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is not None:
            found.append((storage.data_ptr(), storage.nbytes()))
    return found


def _of_others(
    known: Mapping[str, Any],
    index: int,
    users: list[GpuProcess] | str,
    outside: _outside.Found,
    nccl: _nccl.Held,
    has_context: bool,
) -> dict[str, Any]:
    """Return the parts of what this allocator did not reserve."""
    context: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    unknown: dict[str, str] = {}
    own = None
    if isinstance(users, str):
        unknown = {"context": users, "processes": users}
    else:
        own = next((user for user in users if user.pid == os.getpid()), None)
        if own is None and has_context:
            unknown = {"context": _FOREIGN, "processes": _FOREIGN}
        else:
            processes = tuple(user for user in users if user is not own)
            silent = sum(process.bytes is None for process in processes)
            if silent:
                unknown["processes"] = f"NVML does not tell how much {silent} of them use"
    taken: int | None = outside.bytes_on(index)
    if outside.unknown:
        taken, unknown["outside"] = None, outside.unknown
    elif processes is not None and own is None:
        taken = 0  # what is mapped here was allocated by others, who are in the list
    held = _of_nccl(nccl, taken, unknown)
    if own is not None:
        spoken_for = known.get("reserved", 0) + known.get("earlier", 0) + (taken or 0)
        if own.bytes is None:
            unknown["context"] = "NVML does not tell how much this process uses"
        elif outside.unknown:
            unknown["context"] = outside.unknown
        elif own.bytes < spoken_for:
            unknown["context"] = (
                f"NVML counts {size_text(own.bytes)} for this process, which has allocated "
                f"{size_text(spoken_for)}"
            )
            if taken:  # as likely wrong: memory of another process may be mapped here
                taken, unknown["outside"] = None, unknown["context"]
        else:
            context = own.bytes - spoken_for
    elif processes is not None:
        context = 0
    if known.get("workspaces", 0) is None:
        unknown["workspaces"] = "this torch does not tell, or a thread is taking one just now"
    if taken is not None:
        taken -= held or 0
    explained = known.get("earlier", 0) + (context or 0) + (held or 0) + (taken or 0)
    explained += sum(process.bytes or 0 for process in processes or ())
    unexplained = known.get("others", 0) - explained if known.get("device_known") else 0
    if unexplained < 0:
        unknown["unexplained"] = "memory of other processes has changed while it was read"
    return {
        "context": context,
        "processes": processes,
        "nccl": held,
        "outside": taken,
        "unexplained": unexplained,
        "unknown": unknown,
    }


def _of_nccl(nccl: _nccl.Held, taken: int | None, unknown: dict[str, str]) -> int | None:
    """Return what NCCL holds of `taken`, all that this process has outside of its allocator."""
    if nccl.unknown:
        unknown["nccl"] = nccl.unknown
        return None
    if taken is not None and nccl.bytes > taken:
        unknown["nccl"] = (
            f"NCCL counts {size_text(nccl.bytes)}, but this process has allocated only "
            f"{size_text(taken)} outside of torch"
        )
        return None
    return nccl.bytes
