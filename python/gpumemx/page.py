# SPDX-License-Identifier: BSD-3-Clause
"""A picture as one self-contained HTML file: memory over time, and who was alive at the peak.

Plotly draws. Its JavaScript, about 5 MB, is in the file once, and the file's own content policy
forbids every request to a network. Events are brought down to `MAX_POINTS` a line before they are
drawn, so a million of them open as fast as a thousand.
"""

import html
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpumemx._files import write_whole
from gpumemx.errors import MissingPackageError

MAX_POINTS = 4000
"""The most points that a line is drawn with."""
MAX_BARS = 25
"""The most names that a bar chart shows; the smaller ones are added up in one more bar."""

_GIB = 1 << 30
_LABEL = 60
_COLOURS = ("#3b82d6", "#e07b39", "#3a9d5d", "#c2508f", "#8a6fd1", "#a08a1f", "#2aa1a8", "#d0504a")
_GREY = "#8c8c8c"


@dataclass(frozen=True, eq=False)
class Series:
    """Memory over time: a value for each event, as it was then, or for each span of events, the
    highest of it. The lengths are equal."""

    label: str
    """Whose memory it is, such as a policy's name; tells the lines of one chart apart."""
    time_us: Sequence[int] | NDArray[np.int64]
    """Microseconds, from any zero, never going back."""
    live: Sequence[int] | NDArray[np.int64]
    """Bytes that the program had."""
    reserved: Sequence[int | None] | NDArray[np.int64]
    """Bytes that the allocator had taken from the device; None where that is not known."""
    chart: str = ""
    """The title of the chart that it is drawn in; series of one title share a chart."""
    timed: bool = True
    """False: the times are not known, and `time_us` has the events' numbers instead."""


@dataclass(frozen=True)
class Alive:
    """What was alive at a moment under one name: an allocation site, a size class, a category."""

    name: str
    bytes: int
    """Sum of the blocks' sizes."""
    count: int
    """Number of blocks."""


def require_plotly() -> None:
    """Raise the error that `write_page` would raise without plotly, before work is done for it.

    Raises
    ------
    MissingPackageError
        plotly is not installed.
    """
    try:
        importlib.import_module("plotly.offline")
    except ImportError as error:
        raise MissingPackageError(
            "an HTML page needs the package plotly: pip install 'plotly>=6'"
        ) from error


def write_page(
    path: str | os.PathLike[str],
    title: str,
    series: Sequence[Series],
    alive: Mapping[str, Sequence[Alive]],
    notes: Sequence[str],
) -> None:
    """Write one HTML file with everything in it.

    Parameters
    ----------
    path
        The file; it is replaced whole or not at all.
    title
        The page's heading.
    series
        Lines over time; those of one ``chart`` share a chart, in the order of their first one.
        Where all of a chart have the same live bytes, these are drawn once. Time begins at each
        one's first event.
    alive
        Bar charts by title: who was alive, the largest first or not. An empty one is left out.
    notes
        Sentences under the heading.

    Raises
    ------
    MissingPackageError
        plotly is not installed.
    ValueError
        The lengths of a series differ.
    OSError
        The file cannot be written.
    """
    require_plotly()
    charts: dict[str, list[Series]] = {}
    for one in series:
        charts.setdefault(one.chart, []).append(one)
    figures = [_time_figure(name, members) for name, members in charts.items()]
    figures += [_bar_figure(name, groups) for name, groups in alive.items() if groups]
    write_whole(os.fspath(path), _page(title, notes, figures))


# --- aggregation


@dataclass(frozen=True, eq=False)
class Line:
    """What of a series is drawn."""

    event: NDArray[np.int64]
    """Which events they are, counted from 0."""
    time_us: NDArray[np.int64]
    live: NDArray[np.float64]
    reserved: NDArray[np.float64]
    """NaN where it is not known."""


def aggregate(series: Series) -> Line:
    """Bring a series down to at most `MAX_POINTS` events without losing a peak.

    The events that stay are the first and the last, and of each of equally many stretches of events
    those with the least and the most live and reserved bytes.

    Raises
    ------
    ValueError
        The lengths of the series differ.
    """
    time = np.asarray(series.time_us, np.int64)
    live = np.asarray(series.live, np.float64)
    reserved = np.asarray(series.reserved, np.float64)  # None becomes NaN
    n = len(time)
    if not n == len(live) == len(reserved):
        raise ValueError(
            f"the lengths of series '{series.label}' differ: "
            f"time_us {n}, live {len(live)}, reserved {len(reserved)}"
        )
    event = np.arange(n)
    if n > MAX_POINTS:
        # Four a stretch, and the two ends.
        stretch = -(-n // ((MAX_POINTS - 2) // 4))
        stretches = -(-n // stretch)
        start = np.arange(stretches) * stretch
        kept = [np.array([0, n - 1])]
        for values in (live, reserved):
            padded = np.full(stretches * stretch, np.nan)
            padded[:n] = values
            rows = padded.reshape(stretches, stretch)
            for missing, find in ((np.inf, np.argmin), (-np.inf, np.argmax)):
                kept.append(start + find(np.where(np.isnan(rows), missing, rows), axis=1))
        event = np.unique(np.concatenate(kept))
    return Line(event, time[event], live[event], reserved[event])


# --- figures


def _time_figure(name: str, series: Sequence[Series]) -> Any:
    import plotly.graph_objects as go

    lines = [aggregate(one) for one in series]
    timed = all(
        one.timed and (len(line.event) == 0 or line.time_us[-1] > line.time_us[0])
        for one, line in zip(series, lines, strict=True)
    )
    places: list[NDArray[Any]]
    if timed:
        places = [(line.time_us - line.time_us[:1]) / 1e6 for line in lines]
    else:
        places = [
            line.event if one.timed else line.time_us
            for one, line in zip(series, lines, strict=True)
        ]
    figure = go.Figure()

    def add(label: str, x: NDArray[Any], y: NDArray[np.float64], **style: Any) -> None:
        figure.add_scatter(
            x=x,
            y=y / _GIB,
            name=html.escape(label),
            mode="lines",
            line={"shape": "hv", **style},
            hovertemplate="%{y:.3f} GiB",
        )

    several = len(series) > 1
    # Not their lines: which events these keep depends on what was reserved too.
    one_live = all(
        np.array_equal(one.time_us, series[0].time_us) and np.array_equal(one.live, series[0].live)
        for one in series
    )
    for i, (one, line, x) in enumerate(zip(series, lines, places, strict=True)):
        colour = _COLOURS[i % len(_COLOURS)]
        if not np.isnan(line.reserved).all():
            label = f"reserved, {one.label}" if several else "reserved"
            add(label, x, line.reserved, color=colour, width=1.6)
        if not one_live:
            add(f"live, {one.label}", x, line.live, color=colour, dash="dot")
        elif i == 0:
            add("live", x, line.live, color=_GREY)
    if len(places[0]):
        peak = int(lines[0].live.argmax())
        gib = lines[0].live[peak] / _GIB
        figure.add_annotation(
            x=places[0][peak], y=gib, text=f"live peak {gib:.3f} GiB", arrowcolor=_GREY
        )
    figure.update_layout(
        title_text=html.escape(name or "Live and reserved over time"),
        hovermode="x unified",
        xaxis_title="seconds from the first event" if timed else "event",
        yaxis={"title": "GiB", "rangemode": "tozero"},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        height=460,
    )
    return figure


def _bar_figure(name: str, alive: Sequence[Alive]) -> Any:
    import plotly.graph_objects as go

    bars = largest(alive, MAX_BARS)
    total = sum(one.bytes for one in alive)
    # Numbers on the axis and names as its text: two names may be cut to one text.
    places = list(range(len(bars)))
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        x=[one.bytes / _GIB for one in bars],
        y=places,
        marker_color=_COLOURS[0],
        customdata=[
            [html.escape(one.name), f"{one.count:,}", f"{one.bytes / max(1, total):.1%}"]
            for one in bars
        ],
        hovertemplate="%{customdata[0]}<br>%{x:.3f} GiB, %{customdata[2]}, "
        "blocks: %{customdata[1]}<extra></extra>",
    )
    figure.update_layout(
        title_text=html.escape(name),
        xaxis={"title": "GiB", "rangemode": "tozero"},
        yaxis={
            "tickmode": "array",
            "tickvals": places,
            "ticktext": [html.escape(_shortened(one.name)) for one in bars],
            "autorange": "reversed",
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        },
        height=140 + 24 * len(bars),
    )
    return figure


def largest(alive: Sequence[Alive], n: int) -> list[Alive]:
    """Return the n largest, the largest first, and the others as one more."""
    ordered = sorted(alive, key=lambda one: -one.bytes)
    rest = ordered[n:]
    if len(rest) > 1:
        others = Alive(
            f"{len(rest):,} others", sum(o.bytes for o in rest), sum(o.count for o in rest)
        )
        rest = [others]
    return ordered[:n] + rest


def _shortened(name: str) -> str:
    # The end of a path says more than its start.
    return name if len(name) <= _LABEL else f"…{name[1 - _LABEL :]}"


# --- the file

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1200px;
  padding: 0 1rem; background: #ffffff; color: #222222; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e4e4e4; } }
</style>
</head>
<body>
<h1>$title</h1>
$notes
$places
<script>$plotly</script>
<script>
const figures = $figures;
const dark = matchMedia("(prefers-color-scheme: dark)");
function colours() {
  const [text, back, grid] = dark.matches
    ? ["#e4e4e4", "#24272d", "#3a3e46"] : ["#222222", "#ffffff", "#e2e2e2"];
  const look = { "font.color": text, "hoverlabel.bgcolor": back, "hoverlabel.font.color": text };
  for (const axis of ["xaxis", "yaxis"]) {
    look[axis + ".gridcolor"] = grid;
    look[axis + ".zerolinecolor"] = grid;
    look[axis + ".linecolor"] = grid;
  }
  return look;
}
figures.forEach((figure, i) => {
  const options = { responsive: true, displaylogo: false };
  Plotly.newPlot("chart" + i, figure.data, figure.layout, options)
    .then((chart) => Plotly.relayout(chart, colours()));
});
dark.addEventListener("change", () =>
  figures.forEach((_, i) => Plotly.relayout("chart" + i, colours())));
</script>
</body>
</html>
""")


def _page(title: str, notes: Sequence[str], figures: Sequence[Any]) -> str:
    from plotly.offline import get_plotlyjs

    for figure in figures:
        figure.update_layout(
            template="none",
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            margin={"l": 70, "r": 20, "t": 90, "b": 55},
        )
    # Nothing in the data can end the script that it stands in.
    data = json.dumps([json.loads(figure.to_json()) for figure in figures]).replace("<", "\\u003c")
    return _PAGE.substitute(
        title=html.escape(title),
        notes="\n".join(f"<p>{html.escape(note)}</p>" for note in notes),
        places="\n".join(f'<div id="chart{i}"></div>' for i in range(len(figures))),
        plotly=get_plotlyjs(),
        figures=data,
    )
