# SPDX-License-Identifier: BSD-3-Clause
"""Live and reserved memory over the time of a replay."""

import numpy as np
from numpy.typing import NDArray

from gpumemx import _core
from gpumemx.page import MAX_POINTS, Series
from gpumemx.trace import Trace


class Sampler:
    """Looks at a replay once for each point that can be drawn.

    Live bytes are exact. Of reserved bytes, the events between two looks have the most that was
    seen at either, or the new peak if one fell between them.
    """

    def __init__(self, trace: Trace) -> None:
        self.chunk = max(1, -(-len(trace) // MAX_POINTS))
        """The events to do between two looks."""
        self._trace = trace
        self._reserved = np.zeros(len(trace), np.int64)
        self._done = 0
        self._before = 0
        self._peak = 0

    def look(self, replay: _core.Replay) -> None:
        """Take down what is reserved now."""
        now, peak = replay.reserved_bytes, replay.report()["reserved_peak_bytes"]
        highest = max(self._before, now, peak if peak > self._peak else 0)
        self._reserved[self._done : replay.events_done] = highest
        self._done, self._before, self._peak = replay.events_done, now, peak

    def series(self, label: str) -> Series:
        """Return the events done."""
        return Series(
            label=label,
            time_us=self._trace.time_us[: self._done],
            live=_live(self._trace)[: self._done],
            reserved=self._reserved[: self._done],
        )


def _live(trace: Trace) -> NDArray[np.int64]:
    """Return the sum of the sizes asked for after each event."""
    allocates = trace.op >= 0
    slot = np.where(allocates, trace.op, ~trace.op)
    # The events of a slot, one slot after the other: what is freed is what came right before.
    order = np.argsort(slot, kind="stable")
    size = np.where(allocates, trace.size, 0)[order]
    change = np.empty(len(trace), np.int64)
    change[order] = np.where(allocates[order], size, -np.roll(size, 1))
    return np.cumsum(change)
