# SPDX-License-Identifier: BSD-3-Clause
"""Replaying a recorded run: what it would have needed. (The public names are in `gpumemx`.)"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpumemx import _core
from gpumemx._series import Sampler
from gpumemx.errors import TraceError
from gpumemx.page import Series
from gpumemx.trace import Trace, load_trace

Progress = Callable[[str, int, int], object]

# Events between two looks at the keyboard and at the progress callback: about 20 ms.
_CHUNK = 1 << 16
# A device gives memory in pages of this size, so no capacity in between is another capacity.
_PAGE = 2 << 20
# The search for the smallest capacity ends at this share of the peak of live bytes.
_FIT_TOLERANCE = 1e-3
_MAX_CAPACITY = (1 << 63) - 1


@dataclass(frozen=True)
class ReplayResult:
    """What a replay needed. Sizes in bytes, times in seconds unless the name says otherwise."""

    file: str
    """The trace, as it was named."""
    policy: str
    """The allocator that served it: ``"gpumemx"``."""
    events: int
    """Events done; the one that failed is not among them."""
    live_peak_bytes: int
    """Highest sum of the sizes asked for: no allocator can need less."""
    reserved_peak_bytes: int
    """Highest device memory held."""
    fits_in_bytes: int | None
    """The smallest capacity that the trace passes in; None unless asked for."""
    driver_calls: dict[str, int]
    """Calls by kind: create, map, set_access, unmap, release."""
    driver_seconds: float
    """Modelled time of all driver calls."""
    driver_seconds_inline: float
    """Of that, what an allocating or freeing thread waited for."""
    driver_seconds_growth: float
    """Of that, creating handles and mapping them for the first time."""
    trace_seconds: float
    """From the first to the last event done."""
    host_ns_per_event: float
    """Measured time of our own code, the simulated device's included, in nanoseconds."""
    failed_at: int | None
    """Index of the event that ran out of memory, where the replay stopped; or None."""
    wait_seconds: float = 0.0
    """Time that requests waited for streams to complete. Not in `to_dict`."""
    paths: dict[str, int] = field(default_factory=dict)
    """How often each way of serving a request was taken. Not in `to_dict`."""
    series: Series | None = None
    """Live and reserved bytes over time; None unless asked for. Not in `to_dict`."""

    @property
    def ratio(self) -> float:
        """Reserved over live peak; 1.0 cannot be beaten. NaN when nothing was live."""
        return self.reserved_peak_bytes / self.live_peak_bytes if self.live_peak_bytes else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return what ``gpumemx replay --json`` writes for a file."""
        figures = asdict(replace(self, series=None))
        del figures["wait_seconds"], figures["paths"], figures["series"]
        return figures

    def __str__(self) -> str:
        live, reserved = (
            _core.format_bytes(n) for n in (self.live_peak_bytes, self.reserved_peak_bytes)
        )
        text = f"{self.file}: live {live}, reserved {reserved} ({self.ratio:.4f} x)"
        if self.fits_in_bytes is not None:
            text += f", fits in {_core.format_bytes(self.fits_in_bytes)}"
        if self.failed_at is not None:
            text += f", out of memory at event {self.failed_at}"
        return text


def replay(
    trace: Trace | str | os.PathLike[str],
    *,
    capacity: int | str | None = None,
    lag_ms: float = 20.0,
    fit: bool = False,
    series: bool = False,
    progress: Progress | None = None,
) -> ReplayResult:
    """Say what a recorded run would have needed under gpumemx's allocator.

    Parameters
    ----------
    trace
        A trace, or the name of an ``.npz`` file with one.
    capacity
        Memory of the simulated device: bytes, or text such as ``"24GiB"``. Default: no limit. The
        replay stops at the first request that does not fit (``failed_at``).
    lag_ms
        How far the device runs behind the host, in milliseconds: work of a stream completes so long
        after it was queued. 0 to 3,600,000.
    fit
        Also search the smallest capacity that the whole trace passes in, to 0.1 % of its live peak
        or 2 MiB, whichever is more. Replays it about ten times.
    series
        Also keep live and reserved bytes over time, for a picture.
    progress
        Called as ``progress(what, done, total)`` every 65,536 events or more often; ``what`` is
        ``"replay"`` or, for the search, ``"fit <capacity>"``.

    Returns
    -------
    ReplayResult
        All figures but ``host_ns_per_event`` are the same in every run and on every machine.

    Raises
    ------
    TraceError
        The file cannot be read, or the trace is inconsistent.
    ValueError
        ``capacity`` or ``lag_ms`` is out of range.

    Notes
    -----
    Needs no GPU and no torch. Releases the GIL while it replays.

    Examples
    --------
    >>> result = gpumemx.replay("run.npz", capacity="24GiB")     # doctest: +SKIP
    >>> print(result)                                            # doctest: +SKIP
    run.npz: live 11.59 GiB, reserved 11.78 GiB (1.0157 x)
    """
    if isinstance(capacity, str):
        capacity = _core.parse_bytes(capacity)
    if capacity is not None and not 0 < capacity <= _MAX_CAPACITY:
        raise ValueError(f"the capacity must be above 0 and below 2**63 bytes, not {capacity}")
    if not isinstance(trace, Trace):
        trace = load_trace(trace)
    elif mistake := trace.mistake():
        raise TraceError(trace.path, mistake)

    sampler = Sampler(trace) if series else None
    report = _run(trace, capacity, lag_ms, progress, "replay", sampler)
    fits_in = None
    if fit:
        unlimited = report
        if capacity is not None:
            unlimited = _run(trace, None, lag_ms, progress, "fit without a limit")
        fits_in = _smallest_capacity(trace, unlimited, lag_ms, progress)
    return ReplayResult(
        file=trace.path,
        policy="gpumemx",
        fits_in_bytes=fits_in,
        series=None if sampler is None else sampler.series("gpumemx"),
        **report,
    )


def _run(
    trace: Trace,
    capacity: int | None,
    lag_ms: float,
    progress: Progress | None,
    what: str,
    sampler: Sampler | None = None,
) -> dict[str, Any]:
    engine = _core.Replay(
        trace.op,
        trace.size,
        trace.stream,
        trace.time_us,
        trace.slots,
        capacity=capacity,
        lag_ms=lag_ms,
    )
    while not engine.finished:
        engine.run(_CHUNK if sampler is None else sampler.chunk)
        if sampler is not None:
            sampler.look(engine)
        if progress is not None:
            progress(what, engine.events_done, engine.events_total)
    return {**engine.report()}


def _smallest_capacity(
    trace: Trace, unlimited: dict[str, Any], lag_ms: float, progress: Progress | None
) -> int | None:
    """Search between the live peak, below which nothing fits, and what an unlimited run held.

    In pages. Near its capacity the allocator behaves differently, so the upper end is tried too.
    None when the trace does not even fit without a limit.
    """
    if unlimited["failed_at"] is not None:
        return None
    live = int(unlimited["live_peak_bytes"])

    def passes(pages: int) -> bool:
        capacity = pages * _PAGE
        what = f"fit {_core.format_bytes(capacity)}"
        return _run(trace, capacity, lag_ms, progress, what)["failed_at"] is None

    fails = max(1, -(-live // _PAGE))
    if passes(fails):
        return fails * _PAGE
    enough = max(fails + 1, int(unlimited["reserved_peak_bytes"]) // _PAGE)
    while not passes(enough):
        fails, enough = enough, enough + max(1, enough // 50)
    while enough - fails > max(1, int(live * _FIT_TOLERANCE / _PAGE)):
        middle = (fails + enough) // 2
        if passes(middle):
            enough = middle
        else:
            fails = middle
    return enough * _PAGE
