# SPDX-License-Identifier: BSD-3-Clause
"""Replaying a recorded run: what it would have needed. (The public names are in `gpumemx`.)"""

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from gpumemx import _core
from gpumemx._gpus import Gpu, find_gpu
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
class CardVerdict:
    """Whether a trace passes on a card, and by how much. Sizes in bytes."""

    name: str
    """The card's name, in full."""
    total_bytes: int
    """What torch reports for it."""
    usable_bytes: int
    """Estimate of what torch can reserve on it: without CUDA's context, nothing else running."""
    fits: bool
    """Whether the trace passes with that."""
    failed_at: int | None
    """Index of the event that ran out of memory there, or None."""
    spare_bytes: int | None
    """Usable less the smallest capacity that the trace passes in; negative: what is missing. None
    when there is no such capacity."""

    def __str__(self) -> str:
        if self.spare_bytes is None:
            return "does not fit"
        size = _core.format_bytes(abs(self.spare_bytes))
        if self.fits:
            return f"fits, {size} to spare" if self.spare_bytes > 0 else "fits, just"
        return f"does not fit, {size} short" if self.spare_bytes < 0 else "does not fit, just"


@dataclass(frozen=True)
class ReplayResult:
    """What a replay needed. Sizes in bytes, times in seconds unless the name says otherwise."""

    file: str
    """The trace, as it was named."""
    policy: str
    """The allocator that served it: ``"gpumemx"``, ``"native"`` or ``"expandable"``."""
    events: int
    """Events done; the one that failed is not among them."""
    live_peak_bytes: int
    """Highest sum of the sizes asked for: no allocator can need less."""
    reserved_peak_bytes: int
    """Highest device memory held."""
    fits_in_bytes: int | None
    """The smallest capacity that the trace passes in; None unless asked for."""
    driver_calls: dict[str, int]
    """Calls by kind: create, map, set_access, unmap, release; of ``native`` allocate and free."""
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
    retries: int = 0
    """Requests before which torch gave all its cached memory back. Not in `to_dict`."""
    settings: dict[str, str] = field(default_factory=dict)
    """Those that were given. In `to_dict` where there are any."""
    series: Series | None = None
    """Live and reserved bytes over time; None unless asked for. Not in `to_dict`."""
    gpus: tuple[CardVerdict, ...] = ()
    """One for each card that was asked for. In `to_dict` where there are any."""

    @property
    def ratio(self) -> float:
        """Reserved over live peak; 1.0 cannot be beaten. NaN when nothing was live."""
        return self.reserved_peak_bytes / self.live_peak_bytes if self.live_peak_bytes else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return what ``gpumemx replay --json`` writes for a file."""
        figures = asdict(replace(self, series=None))
        del figures["series"]
        del figures["wait_seconds"], figures["paths"], figures["retries"]
        figures["gpus"] = list(figures["gpus"])
        for optional in ("settings", "gpus"):
            if not figures[optional]:
                del figures[optional]
        return figures

    def __str__(self) -> str:
        live, reserved = (
            _core.format_bytes(n) for n in (self.live_peak_bytes, self.reserved_peak_bytes)
        )
        by = "" if self.policy == "gpumemx" else f" under {self.policy}"
        text = f"{self.file}{by}: live {live}, reserved {reserved} ({self.ratio:.4f} x)"
        if self.fits_in_bytes is not None:
            text += f", fits in {_core.format_bytes(self.fits_in_bytes)}"
        if self.failed_at is not None:
            text += f", out of memory at event {self.failed_at}"
        return "; ".join([text, *(f"{gpu.name}: {gpu}" for gpu in self.gpus)])


def replay(
    trace: Trace | str | os.PathLike[str],
    *,
    policy: str = "gpumemx",
    settings: Mapping[str, object] | None = None,
    capacity: int | str | None = None,
    lag_ms: float = 20.0,
    fit: bool = False,
    gpu: str | Sequence[str] | None = None,
    series: bool = False,
    progress: Progress | None = None,
) -> ReplayResult:
    """Say what a recorded run would have needed under an allocator.

    Parameters
    ----------
    trace
        A trace, or the name of an ``.npz`` file with one.
    policy
        ``"gpumemx"``; or a model of torch's own allocator, ``"native"``, ``"expandable"`` (with
        ``expandable_segments:True``).
    settings
        By name: for gpumemx those of `install_allocator`, for torch's allocator those of
        ``PYTORCH_ALLOC_CONF`` that change what it holds (``max_split_size_mb``,
        ``max_non_split_rounding_mb``, ``roundup_power2_divisions``,
        ``garbage_collection_threshold``, ``large_segment_size_mb``, ``expandable_segments``).
    capacity
        What may be reserved, as ``torch.cuda.set_per_process_memory_fraction`` limits it: bytes, or
        text such as ``"24GiB"``. Default: no limit. The replay stops at the first request that does
        not fit (``failed_at``).
    lag_ms
        How far the device runs behind the host, in milliseconds: work of a stream completes so long
        after it was queued. 0 to 3,600,000. torch's allocator does not depend on it.
    fit
        Also search the smallest capacity that the whole trace passes in, to 0.1 % of its live peak
        or 2 MiB, whichever is more. Replays it about ten times.
    gpu
        Cards by name (``"RTX 4090"``, ``"A100-80GB"``): whether the trace fits there. Searches the
        smallest capacity too.
    series
        Also keep live and reserved bytes over time, for a picture.
    progress
        Called as ``progress(what, done, total)`` every 65,536 events or more often; ``what`` is
        ``"replay"``, for the search ``"fit <capacity>"``, or ``"on <card>"``.

    Returns
    -------
    ReplayResult
        All figures but ``host_ns_per_event`` are the same in every run and on every machine.

    Raises
    ------
    TraceError
        The file cannot be read, or the trace is inconsistent.
    ValueError
        ``capacity``, ``lag_ms`` or a setting is out of range; or there is no such policy, setting
        or card, and the text has the nearest name.

    Notes
    -----
    Needs no GPU and no torch. Releases the GIL while it replays.

    Examples
    --------
    >>> import gpumemx
    >>> result = gpumemx.replay("examples/traces/gnn_sampling.npz", capacity="24GiB")
    >>> print(result)  # doctest: +ELLIPSIS
    examples/traces/gnn_sampling.npz: live 23.69 GiB, reserved 23.7... GiB (1.00... x)
    >>> result.failed_at is None
    True
    """
    if isinstance(capacity, str):
        capacity = _core.parse_bytes(capacity)
    if capacity is not None and not 0 < capacity <= _MAX_CAPACITY:
        raise ValueError(f"the capacity must be above 0 and below 2**63 bytes, not {capacity}")
    check_policy(policy)
    own = settings_for(policy, settings or {})
    if foreign := [key for key in settings or {} if key not in own]:
        raise ValueError(unknown_setting(foreign[0], [policy]))
    cards = [find_gpu(name) for name in ([gpu] if isinstance(gpu, str) else gpu or ())]
    if not isinstance(trace, Trace):
        trace = load_trace(trace)
    elif mistake := trace.mistake():
        raise TraceError(trace.path, mistake)

    engine = _Engine(trace, policy, own, lag_ms, progress)
    sampler = Sampler(trace) if series else None
    report = engine.run("replay", capacity=capacity, sampler=sampler)
    fits_in = None
    if fit or cards:
        unlimited = report if capacity is None else engine.run("fit without a limit")
        fits_in = _smallest_capacity(engine, unlimited)
    return ReplayResult(
        file=trace.path,
        policy=policy,
        fits_in_bytes=fits_in,
        settings=own,
        series=None if sampler is None else sampler.series(policy),
        gpus=tuple(_verdict(engine, card, capacity, fits_in) for card in cards),
        **report,
    )


def check_policy(policy: str) -> None:
    """Raise a ValueError with the nearest name if there is no such policy."""
    known = _core.policies()
    if policy not in known:
        near = _nearest(policy, known)
        raise ValueError(f"there is no policy '{policy}'; the nearest name is '{near}'")


def settings_for(policy: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Return those of the settings that the policy has, as text."""
    known = _core.policy_settings(policy)
    own = {key: str(value) for key, value in settings.items() if key in known}
    if policy == "expandable" and own.get("expandable_segments", "true").lower() == "false":
        raise ValueError(
            "expandable_segments:False is the policy native; expandable is native with True"
        )
    return own


def check_settings(policy: str, settings: dict[str, str]) -> None:
    """Raise a ValueError for a value that the policy does not take."""
    none = np.empty(0, np.int64)
    nothing = Trace(op=none, size=none, stream=none.astype(np.int16), time_us=none, slots=0)
    _Engine(nothing, policy, settings, 0.0, None).run("")


def unknown_setting(key: str, policies: Sequence[str]) -> str:
    """Say that none of the policies has the setting, and which name is nearest."""
    owners = {name: p for p in reversed(_core.policies()) for name in _core.policy_settings(p)}
    owners |= {name: p for p in policies for name in _core.policy_settings(p)}
    chosen = ", ".join(policies)
    if key in owners:
        return f"'{key}' is a setting of the policy {owners[key]}, not of {chosen}"
    near = _nearest(key, list(owners))
    of = "" if owners[near] in policies else f", of the policy {owners[near]}"
    return f"there is no setting '{key}'; the nearest name is '{near}'{of}"


def _nearest(name: str, known: Sequence[str]) -> str:
    return max(known, key=lambda other: difflib.SequenceMatcher(None, name.lower(), other).ratio())


@dataclass(frozen=True)
class _Engine:
    """Replays one trace under one policy, under one limit after the other."""

    trace: Trace
    policy: str
    settings: dict[str, str]
    lag_ms: float
    progress: Progress | None

    def run(
        self,
        what: str,
        *,
        capacity: int | None = None,
        card: Gpu | None = None,
        sampler: Sampler | None = None,
    ) -> dict[str, Any]:
        trace = self.trace
        engine = _core.Replay(
            trace.op,
            trace.size,
            trace.stream,
            trace.time_us,
            trace.slots,
            capacity=capacity,
            lag_ms=self.lag_ms,
            policy=self.policy,
            settings=self.settings,
            device_bytes=None if card is None else card.usable,
            device_total_bytes=None if card is None else card.total,
        )
        while not engine.finished:
            engine.run(_CHUNK if sampler is None else sampler.chunk)
            if sampler is not None:
                sampler.look(engine)
            if self.progress is not None:
                self.progress(what, engine.events_done, engine.events_total)
        return {**engine.report()}


def _verdict(engine: _Engine, card: Gpu, capacity: int | None, fits_in: int | None) -> CardVerdict:
    failed_at = engine.run(f"on {card.name}", capacity=capacity, card=card)["failed_at"]
    return CardVerdict(
        name=card.name,
        total_bytes=card.total,
        usable_bytes=card.usable,
        fits=failed_at is None,
        failed_at=failed_at,
        spare_bytes=None if fits_in is None else card.usable - fits_in,
    )


def _smallest_capacity(engine: _Engine, unlimited: dict[str, Any]) -> int | None:
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
        return engine.run(what, capacity=capacity)["failed_at"] is None

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
