# SPDX-License-Identifier: BSD-3-Clause
"""What a memory snapshot of PyTorch says. (The public names are in `gpumemx`.)"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpumemx import _core
from gpumemx.errors import TraceError
from gpumemx.page import Alive, Series

if TYPE_CHECKING:
    from gpumemx._core import _SnapshotDevice

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Recording:
    """How much of the program's history a snapshot holds."""

    state: str
    """``"on"``; ``"state only"``: what was live, without what led to it; ``"off"``: never on."""
    overflowed: bool
    """Whether the oldest events are lost because the recording was full."""
    baseline_bytes: int
    """Live before the first event."""
    unknown_frees: int
    """Events that free a block that no event allocates."""


@dataclass(frozen=True)
class Peak:
    """The moment with the most live bytes."""

    event: int
    """Index among the device's events; -1: it was before the first."""
    time_us: int | None
    """Microseconds since 1970; None where the file does not tell."""
    live: int
    """Bytes."""
    reserved: int | None
    """Bytes; None where the file does not tell."""


@dataclass(frozen=True)
class LonelySegment:
    """A segment that only one small block keeps from being given back."""

    address: int
    size: int
    """Bytes of the segment."""
    held_by: str
    """Where the block was allocated."""
    bytes: int
    """Bytes of the block."""


@dataclass(frozen=True)
class Fragmentation:
    """What was reserved and not live at the peak, in bytes."""

    reserved: int
    live: int
    largest_free: int
    """The largest free block: nothing larger was served without more memory from the device."""
    free_in_busy_segments: int
    """Free, but in segments in which something is live: not to be given back."""
    lonely_segments: tuple[LonelySegment, ...]

    @property
    def unused(self) -> int:
        """Reserved and not live."""
        return self.reserved - self.live


@dataclass(frozen=True)
class OutOfMemory:
    """A request that failed. Bytes; None where the file does not tell."""

    event: int
    requested: int
    device_free: int | None
    """What the device could still hand out."""
    live: int
    reserved: int | None
    meaning: str
    """In a sentence."""


@dataclass(frozen=True)
class DeviceAnalysis:
    """What a snapshot says about one device. Sizes in bytes."""

    device: int
    events: int
    recording: Recording
    live_now: int
    """When the snapshot was made."""
    reserved_now: int | None
    peak: Peak
    """Without events: when the snapshot was made."""
    by_site: tuple[Alive, ...]
    """Alive at the peak, by ``file:line``."""
    by_size_class: tuple[Alive, ...]
    by_category: tuple[Alive, ...]
    """As far as the recorded frames allow."""
    fragmentation: Fragmentation
    ooms: tuple[OutOfMemory, ...]
    series: Series
    """Live and reserved over time, the highest of each of some thousand spans of events."""

    def notes(self) -> list[str]:
        """Return what the recording leaves out, in sentences."""
        said = []
        if self.recording.state == "off":
            said.append(
                "The recording was never on: the file holds only what was live when it was made. "
                "For the peak, call torch.cuda.memory._record_memory_history() at the start."
            )
        elif self.recording.state == "state only":
            said.append(
                "Only the state was recorded, not what led to it. For the peak, call "
                "torch.cuda.memory._record_memory_history() without enabled='state'."
            )
        if self.recording.overflowed:
            said.append(
                "The recording was full and lost its oldest events: an earlier peak is not in the "
                "file. Give _record_memory_history() a larger max_entries, or dump sooner."
            )
        if self.events and self.recording.baseline_bytes:
            size = _core.format_bytes(self.recording.baseline_bytes)
            said.append(f"{size} was live before the first event.")
        if self.recording.unknown_frees:
            said.append(
                f"{self.recording.unknown_frees:,} events free blocks that no event in the file "
                "allocates: where these are from is not known."
            )
        return said

    def advice(self) -> list[str]:
        """Return the one or two sentences that a person should know."""
        said = []
        if self.ooms:
            last = self.ooms[-1]
            size = _core.format_bytes(last.requested)
            said.append(f"Out of memory, asked for {size}: {last.meaning}")
        if sentence := self._unused():
            said.append(sentence)
        if sentence := self._largest():
            said.append(sentence)
        if not said:
            said.append("Nothing was alive.")
        return said[:2]

    def _largest(self) -> str:
        site = max(self.by_site, key=lambda one: one.bytes, default=None)
        if site is None or not self.peak.live:
            return ""
        when = "at the peak" if self.events else "then"
        share = site.bytes / self.peak.live
        if share >= _LARGE_SITE:
            blocks = f"{site.count:,} block{'s' * (site.count != 1)}"
            return (
                f"The largest part of what was alive {when}, {share:.0%} "
                f"({_core.format_bytes(site.bytes)} in {blocks}), is from {site.name}."
            )
        text = f"What was alive {when} is spread over {len(self.by_site):,} allocation sites"
        kind = max(self.by_category, key=lambda one: one.bytes, default=None)
        if kind is not None:
            text += f"; by category, most of it ({kind.bytes / self.peak.live:.0%}): {kind.name}"
        return f"{text}."

    def _unused(self) -> str:
        found = self.fragmentation
        if not found.reserved:
            return ""
        share = found.unused / found.reserved
        if share < _MUCH_UNUSED:
            return (
                f"{1 - share:.0%} of what was reserved was in use: only less live memory helps, "
                "another allocator setting does not."
            )
        text = f"{share:.0%} of what was reserved ({_core.format_bytes(found.unused)}) was unused"
        if found.free_in_busy_segments * 2 < found.unused:
            return f"{text}, most of it in segments without a live block: torch can give it back."
        return (
            f"{text}, most of it in segments that live blocks hold: expandable_segments:True or "
            "gpumemx makes such holes usable."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what ``gpumemx analyze --json`` writes for a device."""
        figures = {name: value for name, value in vars(self).items() if name in _PLAIN}
        for name in ("recording", "peak", "fragmentation"):
            figures[name] = asdict(getattr(self, name))
        figures["ooms"] = [asdict(oom) for oom in self.ooms]
        figures["alive_at_peak"] = {
            group: [{key: one.name, "bytes": one.bytes, "count": one.count} for one in found]
            for group, key, found in (
                ("by_site", "site", self.by_site),
                ("by_size_class", "class", self.by_size_class),
                ("by_category", "category", self.by_category),
            )
        }
        figures["notes"] = self.notes()
        figures["advice"] = self.advice()
        figures["series"] = {
            name: list(getattr(self.series, name)) for name in ("time_us", "live", "reserved")
        }
        return figures


# Less than that is what rounding and a settled cache leave unused.
_MUCH_UNUSED = 0.1
# A smaller one is no place to begin at.
_LARGE_SITE = 0.1
_PLAIN = ("device", "events", "live_now", "reserved_now")


@dataclass(frozen=True)
class Analysis:
    """What a memory snapshot says."""

    file: str
    """The snapshot, as it was named."""
    schema: str
    """Which form of the file it is, in words."""
    devices: tuple[DeviceAnalysis, ...]
    """Those that the file tells something of."""

    def to_dict(self) -> dict[str, Any]:
        """Return what ``gpumemx analyze --json`` writes."""
        return {
            "file": self.file,
            "schema": self.schema,
            "devices": [device.to_dict() for device in self.devices],
        }

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.schema}"]
        for device in self.devices:
            reserved = device.peak.reserved
            lines.append(
                f"GPU {device.device}: live peak {_core.format_bytes(device.peak.live)}"
                + ("" if reserved is None else f", reserved {_core.format_bytes(reserved)}")
                + "".join(f"\n  {sentence}" for sentence in device.advice())
            )
        return "\n".join(lines)


def analyze(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Analysis:
    """Say what a memory snapshot of PyTorch tells: its peak, who was alive then, fragmentation.

    Parameters
    ----------
    path
        A file that ``torch.cuda.memory._dump_snapshot(path)`` wrote, of any torch since 2.0.
    progress
        Called as ``progress(done, total)`` in bytes of the file.

    Returns
    -------
    Analysis
        Sizes in bytes. The same for a file in every run and on every machine.

    Raises
    ------
    TraceError
        The file is missing, truncated, no snapshot, or would run code when unpickled.

    Notes
    -----
    Needs no GPU and no torch. Nothing in the file is executed, so one from anywhere may be read.

    Examples
    --------
    >>> import gpumemx
    >>> found = gpumemx.analyze("tests/data/gnn_sampling.pickle")
    >>> found.devices[0].by_site[0].name
    'train.py:118 gnn_sampling'
    """
    name = os.fspath(path)
    try:
        # As bytes: a file's name need not be text.
        found = _core.analyze_snapshot(os.fsencode(name), progress)
    except OSError as error:
        raise TraceError(name, error.strerror or str(error)) from error
    except ValueError as error:
        raise TraceError(name, str(error).removeprefix(f"{name}: ")) from error
    return Analysis(
        file=name, schema=found["schema"], devices=tuple(map(_device, found["devices"]))
    )


def _device(found: "_SnapshotDevice") -> DeviceAnalysis:
    name = f"GPU {found['device']}"
    times = found["series"]["time_us"]
    alive = found["alive_at_peak"]
    fragmentation = found["fragmentation"]
    lonely = tuple(LonelySegment(**segment) for segment in fragmentation["lonely_segments"])
    return DeviceAnalysis(
        device=found["device"],
        events=found["events"],
        recording=Recording(**found["recording"]),
        live_now=found["live_now"],
        reserved_now=found["reserved_now"],
        peak=Peak(**found["peak"]),
        by_site=tuple(Alive(g["site"], g["bytes"], g["count"]) for g in alive["by_site"]),
        by_size_class=tuple(
            Alive(g["class"], g["bytes"], g["count"]) for g in alive["by_size_class"]
        ),
        by_category=tuple(
            Alive(g["category"], g["bytes"], g["count"]) for g in alive["by_category"]
        ),
        fragmentation=Fragmentation(
            reserved=fragmentation["reserved"],
            live=fragmentation["live"],
            largest_free=fragmentation["largest_free"],
            free_in_busy_segments=fragmentation["free_in_busy_segments"],
            lonely_segments=lonely,
        ),
        ooms=tuple(OutOfMemory(**oom) for oom in found["ooms"]),
        series=Series(
            label=name,
            chart=name,
            # Without times there are the events' numbers. No clock since 1970 is that low.
            timed=len(times) > 0 and times[-1] > found["events"],
            **found["series"],
        ),
    )
