# SPDX-License-Identifier: BSD-3-Clause
"""Why a request for device memory failed: the report of an out-of-memory error.

torch raises its own error, which carries nothing but text. gpumemx's text ends with the number of a
report that is kept, so each error finds its own, as the property ``report`` of
``torch.OutOfMemoryError`` (`gpumemx._adapter.attach_report`). An error of torch's own allocator, or
of another process, is read as far as its text goes.
"""

import logging
import os
import re
import sys
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gpumemx import _adapter
from gpumemx._nvml import GpuProcess

_log = logging.getLogger("gpumemx")


@dataclass(frozen=True)
class OomHolder:
    """Live memory that one line of the program asked for."""

    site: str
    """``file:line function``: the innermost that is not torch's."""
    bytes: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.site}: {_size(self.bytes)} in {self.blocks} block(s)"


@dataclass(frozen=True)
class OomReport:
    """One request that failed, in bytes.

    ``total = reserved + others + free`` and ``reserved = live + pending + cached + held``, as in
    `gpumemx.MemoryInfo`, at the moment of the failure. Where the device could not be asked
    (`device_known` is False), `total`, `others` and `free` are 0.
    """

    device: int
    cause: str
    """``full``, ``fragmented``, ``capped``, ``other users``, ``pending on streams``, ``held by
    pools``, ``nonsense size``, ``during a capture``, ``refused by the driver``, ``shutting down``
    or, with torch's own allocator, also ``unknown``."""
    requested: int
    """What the program asked for."""
    exact: bool = True
    """Whether the figures are gpumemx's; else they are what the text of torch's error says, which
    is rounded, and the parts of `reserved` are not told apart."""
    block: int = 0
    """The same, rounded to what an allocation takes."""
    stream: int = 0
    """Handle of the CUDA stream; 0 is the default stream."""
    rejected: bool = False
    """Whether torch's ``throw_on_cudamalloc_oom`` refused it before anything was tried."""
    total: int = 0
    free: int = 0
    others: int = 0
    """All that this allocator did not reserve: contexts, libraries, other processes."""
    cap: int | None = None
    """The most that this process may reserve, or None."""
    cap_source: str = ""
    """Who set it."""
    reserved: int = 0
    live: int = 0
    pending: int = 0
    cached: int = 0
    held: int = 0
    in_private_pools: int = 0
    """Of `reserved`, whatever its state."""
    largest_free: int = 0
    device_known: bool = False
    driver_said: str = ""
    """The last driver call that failed."""
    holders: tuple[OomHolder, ...] = ()
    """The five lines that hold most, if a memory history is recorded."""
    processes: tuple[GpuProcess, ...] = ()
    """The other processes on the device, the largest first, when the report was first asked for."""
    processes_unknown: str = ""
    """Why they are not known; empty where they are."""
    advice: str = ""
    """One sentence about what would have helped; empty where nothing is known to."""
    text: str = ""
    """All of it in words."""
    id: str = ""
    """What the error's text ends with."""

    def __str__(self) -> str:
        lines = [
            f"GPU {self.device} could not serve {_size(self.requested)}: {self.cause}",
            f"  device    {_size(self.total)} = {_size(self.reserved)} reserved here + "
            f"{_size(self.others)} others + {_size(self.free)} free"
            if self.device_known
            else "  device    unknown",
        ]
        if self.exact:
            lines.append(
                f"  reserved  {_size(self.reserved)} = {_size(self.live)} live + "
                f"{_size(self.pending)} pending + {_size(self.cached)} cached + "
                f"{_size(self.held)} held"
            )
        if self.cap is not None:
            source = f", set by {self.cap_source}" if self.cap_source else ""
            lines.append(f"  cap       {_size(self.cap)}{source}")
        lines += [f"  holder    {holder}" for holder in self.holders]
        if self.others:
            lines += [f"  process   {_of_process(process)}" for process in self.processes]
            if self.processes_unknown:
                lines.append(f"  processes unknown ({self.processes_unknown})")
        if self.driver_said:
            lines.append(f"  driver    {self.driver_said}")
        if self.advice:
            lines.append(f"  advice    {self.advice}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, error: BaseException) -> "OomReport | None":
        """Return the report of an error, or None when it says nothing of device memory.

        The same as ``error.report``, for type checkers and for errors of other types.
        """
        text = str(error)
        found, adapter = _ID.search(text), _adapter.installed()
        figures = adapter.oom_report(found[1]) if found and adapter else None
        return _from_text(text) if figures is None else _from_figures(figures)


_ID = re.compile(r"\(report (\d+-\d+)\)")


def last_oom() -> OomReport | None:
    """Return the report of the last request that failed in this process, on any thread.

    Returns
    -------
    OomReport or None
        None when none has failed, or torch's own allocator is in charge, which keeps no reports:
        there ``error.report`` reads the error.

    Examples
    --------
    >>> import gpumemx
    >>> print(gpumemx.last_oom())
    None
    """
    adapter = _adapter.installed()
    figures = None if adapter is None else adapter.last_oom()
    return None if figures is None else _from_figures(figures)


# What NVML said when a report was first asked for: it is made anew each time.
_asked: "OrderedDict[str, tuple[tuple[GpuProcess, ...], str]]" = OrderedDict()
_MOST_ASKED = 256
_asked_mu = threading.Lock()


def _processes(id: str, device: int) -> tuple[tuple[GpuProcess, ...], str]:
    with _asked_mu:
        if id in _asked:
            return _asked[id]
    from gpumemx import _memory

    answer = _memory.other_processes(device)
    with _asked_mu:
        kept = _asked.setdefault(id, answer)
        while len(_asked) > _MOST_ASKED:
            _asked.popitem(last=False)
        return kept


def _of_process(process: GpuProcess) -> str:
    amount = "an unknown amount" if process.bytes is None else _size(process.bytes)
    return f"{process}: {amount}"


def _from_figures(f: "_adapter.OomFigures") -> OomReport:
    processes, processes_unknown = _processes(f["id"], f["device"])
    same = {field.name for field in fields(OomReport)} & set(f)
    known: dict[str, Any] = {key: value for key, value in f.items() if key in same}
    known["holders"] = tuple(OomHolder(*holder) for holder in f["holders"])
    known.update(
        processes=processes,
        processes_unknown=processes_unknown,
        total=f["device_total"],
        free=f["device_free"],
        cached=f["idle"] + f["idle_pending"],
        held=f["held"] + f["idle_private"],
    )
    return OomReport(**known)


# --- what an error's text says

_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|KiB|MiB|GiB|TiB)"
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _read(pattern: str, text: str) -> int | None:
    found = re.search(pattern.replace("SIZE", _SIZE), text)
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def _from_text(text: str) -> OomReport | None:
    """Read torch's own sentences (c10/cuda/CUDACachingAllocator.cpp)."""
    requested = _read(r"CUDA out of memory\. Tried to allocate SIZE", text)
    if requested is None:
        return None
    device = re.search(r"GPU (\d+) has a total capacity", text)
    total = _read(r"total capacity of SIZE", text)
    free = _read(r"of which SIZE is free", text)
    cap = _read(r"SIZE allowed", text)
    live = _read(r"Of the allocated memory SIZE is allocated by PyTorch", text) or 0
    idle = _read(r"SIZE is reserved by PyTorch but unallocated", text) or 0
    pools = _read(r"with SIZE allocated in private pools", text) or 0
    known = total is not None and free is not None
    cause = "unknown"
    if total is not None and free is not None:
        if requested > total:
            cause = "nonsense size"
        elif cap is not None and live + requested > cap:
            cause = "capped"
        elif free >= requested and cap is None:
            cause = "refused by the driver"
        elif idle + free >= requested:
            cause = "fragmented"
        elif live + idle + requested <= total and cap is None:
            cause = "other users"
        else:
            cause = "full"
    reserved = live + idle
    return OomReport(
        device=int(device[1]) if device else 0,
        cause=cause,
        requested=requested,
        exact=False,
        total=total or 0,
        free=free or 0,
        others=max(0, (total or 0) - (free or 0) - reserved) if known else 0,
        cap=cap,
        reserved=reserved,
        live=live,
        cached=idle,
        in_private_pools=pools,
        device_known=known,
        text=text,
    )


# --- dumps

_dumps_mu = threading.Lock()
_dumps: "_Dumps | None" = None


class _Dumps:
    def __init__(self, folder: Path, most: int) -> None:
        self.folder = folder
        self.left = most
        self.count = 0


def dump_on_oom(folder: "str | os.PathLike[str] | None", *, most: int = 3) -> None:
    """Write a memory snapshot to a folder when a request fails, before the error is raised.

    The files are named ``oom_<process>_<number>.pickle`` and are what ``gpumemx analyze`` and
    torch's viewer read. With ``torch.cuda.memory._record_memory_history()`` they tell which lines
    hold memory.

    Parameters
    ----------
    folder
        Made if it is not there. None: write no more.
    most
        How many files this process writes from now on; the first failures tell most.

    Raises
    ------
    InstallError
        gpumemx is not torch's allocator.
    ValueError
        `most` is less than 1.

    Notes
    -----
    A snapshot that cannot be written is logged as a warning; the error is raised all the same.

    Examples
    --------
    >>> import gpumemx
    >>> gpumemx.dump_on_oom("snapshots", most=1)  # doctest: +SKIP
    >>> gpumemx.dump_on_oom(None)
    """
    global _dumps
    if most < 1:
        raise ValueError(f"dump_on_oom(): most is 1 or more, not {most}")
    if folder is None:
        with _dumps_mu:
            _dumps = None
        return
    adapter = _adapter.installed()
    if adapter is None:
        from gpumemx.errors import InstallError

        raise InstallError(
            "dump_on_oom() needs gpumemx as torch's allocator: call install_allocator() first"
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with _dumps_mu:
        _dumps = _Dumps(path, most)
    _listen(adapter)


_listening = False


def _listen(adapter: _adapter.Adapter) -> None:
    global _listening
    if not _listening:
        _listening = True
        adapter.on_out_of_memory(_dump)


def _dump(figures: "_adapter.OomFigures") -> None:
    with _dumps_mu:
        dumps = _dumps
        if dumps is None or dumps.left == 0:
            return
        dumps.left -= 1
    path = dumps.folder / f"oom_{figures['id'].replace('-', '_')}.pickle"
    try:
        import pickle

        torch = sys.modules["torch"]
        snapshot = torch._C._cuda_memorySnapshot(None)
        with path.open("wb") as file:
            pickle.dump(snapshot, file)
    except Exception as error:  # it must not stand in for the error that is being raised
        _log.warning("no snapshot was written to %s: %s", path, error)
    else:
        _log.warning("GPU %d ran out of memory; a snapshot is in %s", figures["device"], path)


def _size(size: int) -> str:
    from gpumemx import _core

    return _core.format_bytes(size)
