# SPDX-License-Identifier: BSD-3-Clause
"""``gpumemx analyze``: what a memory snapshot says, in tables, as JSON and as a page."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumemx import _core
from gpumemx._analyze import Analysis, DeviceAnalysis, analyze
from gpumemx._console import complain, progress_bar, shown, written
from gpumemx._files import write_whole
from gpumemx.errors import MissingPackageError, TraceError
from gpumemx.page import Alive, largest, require_plotly, write_page

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 100
# Smaller files are done before a bar could be read.
_LARGE_FILE = 20 << 20


def analyze_command(
    file: str, *, device: int | None, top: int, json_file: str | None, html_file: str | None
) -> int:
    """Run the command and return its exit status."""
    try:
        if html_file is not None:
            require_plotly()
        found = _chosen(_analyzed(file), device)
    except TraceError as error:
        complain("analyze", error.path, error.reason)
        return 2
    except MissingPackageError as error:
        complain("analyze", "--html", str(error))
        return 2

    good = True
    if json_file is not None:
        text = json.dumps(found.to_dict(), indent=2) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            good &= written("analyze", json_file, lambda: write_whole(json_file, text))
    if html_file is not None:
        good &= written("analyze", html_file, lambda: _write_page(html_file, found))
    if json_file != "-":
        _print(found, top)
    return 0 if good else 2


def _analyzed(file: str) -> Analysis:
    path = Path(file)
    size = path.stat().st_size if path.is_file() else 0
    with progress_bar(shown(path.name), size, worth=size >= _LARGE_FILE) as show:
        if show is None:
            return analyze(file)
        return analyze(file, progress=lambda done, total: show("reading", done, total))


def _chosen(found: Analysis, device: int | None) -> Analysis:
    """Return the analysis with one device, or as it is."""
    if device is None:
        return found
    chosen = tuple(one for one in found.devices if one.device == device)
    if not chosen:
        there = ", ".join(str(one.device) for one in found.devices) or "none"
        raise TraceError(found.file, f"tells nothing of device {device} (of these: {there})")
    return Analysis(file=found.file, schema=found.schema, devices=chosen)


# --- the page


def _write_page(file: str, found: Analysis) -> None:
    several = len(found.devices) > 1
    alive: dict[str, Sequence[Alive]] = {}
    notes = []
    for device in found.devices:
        name = f"GPU {device.device}"
        alive[f"{name}: {_when(device)}, by allocation site"] = device.by_site
        for sentence in (*device.notes(), *device.advice()):
            notes.append(f"{name}: {sentence}" if several else sentence)
    series = [device.series for device in found.devices if device.events]
    write_page(file, f"gpumemx analyze: {shown(Path(found.file).name)}", series, alive, notes)


# --- tables


def _print(found: Analysis, top: int) -> None:
    from rich.console import Console
    from rich.text import Text

    terminal = Console()
    width = min(_WIDTH, terminal.width) if terminal.is_terminal else _WIDTH
    console = Console(width=width, highlight=False)
    console.print(Text(f"{shown(found.file)}: {found.schema}"))
    if not found.devices:
        console.print("Nothing was allocated on any device, and nothing was recorded.")
    for device in found.devices:
        _print_device(console, device, top)


def _print_device(console: "Console", device: DeviceAnalysis, top: int) -> None:
    from rich.text import Text

    if notes := device.notes():
        console.print()
    for note in notes:
        console.print(Text(f"GPU {device.device}: {note}"))
    when = _when(device)
    _print_memory(console, device)
    _print_alive(console, when, "allocation site", largest(device.by_site, top))
    _print_alive(console, when, "size of block", device.by_size_class)
    _print_alive(console, when, "category", device.by_category)
    _print_fragmentation(console, device)
    _print_lonely(console, device, top)
    _print_ooms(console, device, top)
    console.print()
    for sentence in device.advice():
        console.print(Text(f"GPU {device.device}: {sentence}", style="bold"))


def _when(device: DeviceAnalysis) -> str:
    return "Alive at the peak" if device.events else "Alive when the snapshot was made"


def _size(size: int | None) -> str:
    return "-" if size is None else _core.format_bytes(size)


def _print_table(console: "Console", title: str, table: "Table") -> None:
    from rich.text import Text

    console.print()
    console.print(Text(title, style="bold"))  # as a table's own title it would be as narrow as that
    console.print(table)


def _table(*, right: Sequence[str], left: Sequence[str] = ()) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.show_edge = False
    table.padding = (0, 1, 0, 0)
    for header in right:
        table.add_column(header, justify="right", no_wrap=True)
    for header in left:
        table.add_column(header, overflow="fold")
    return table


def _print_memory(console: "Console", device: DeviceAnalysis) -> None:
    table = _table(right=["", "event", "time", "live", "reserved"])
    if device.events:
        peak = device.peak
        event = f"{peak.event:,}" if peak.event >= 0 else "before all"
        time = "-"
        if peak.time_us is not None and device.series.timed:
            time = f"{(peak.time_us - int(device.series.time_us[0])) / 1e6:,.3f} s"
        table.add_row("at the peak", event, time, _size(peak.live), _size(peak.reserved))
    table.add_row("at the end", "", "", _size(device.live_now), _size(device.reserved_now))
    _print_table(console, f"GPU {device.device}: {device.events:,} events", table)


def _print_fragmentation(console: "Console", device: DeviceAnalysis) -> None:
    found = device.fragmentation
    if not found.reserved:  # the file tells nothing of segments
        return
    table = _table(right=["reserved", "live", "unused", "in busy segments", "largest free"])
    sizes = (found.reserved, found.live, found.unused)
    table.add_row(*map(_size, (*sizes, found.free_in_busy_segments, found.largest_free)))
    when = "at the peak" if device.events else "when the snapshot was made"
    _print_table(console, f"Fragmentation {when}", table)


def _print_alive(console: "Console", when: str, what: str, alive: Sequence[Alive]) -> None:
    from rich.text import Text

    if not alive:
        return
    total = sum(one.bytes for one in alive)
    table = _table(right=["size", "share", "blocks"], left=[what])
    for one in alive:
        share = f"{one.bytes / total:.1%}" if total else "-"
        table.add_row(_size(one.bytes), share, f"{one.count:,}", Text(one.name))
    _print_table(console, f"{when}, by {what}", table)


def _print_lonely(console: "Console", device: DeviceAnalysis, top: int) -> None:
    from rich.text import Text

    segments = sorted(device.fragmentation.lonely_segments, key=lambda one: -one.size)
    if not segments:
        return
    table = _table(right=["address", "segment", "block"], left=["held by"])
    for one in segments[:top]:
        table.add_row(f"{one.address:#x}", _size(one.size), _size(one.bytes), Text(one.held_by))
    _print_table(console, "Segments that one small block holds", table)


def _print_ooms(console: "Console", device: DeviceAnalysis, top: int) -> None:
    from rich.text import Text

    if not device.ooms:
        return
    headers = ["event", "asked for", "free on device", "live", "reserved"]
    table = _table(right=headers, left=["what it meant"])
    # The last ones: what ended the program is among them.
    for one in device.ooms[max(0, len(device.ooms) - max(1, top)) :]:
        table.add_row(
            *(f"{one.event:,}", _size(one.requested), _size(one.device_free)),
            *(_size(one.live), _size(one.reserved), Text(one.meaning)),
        )
    times = len(device.ooms)
    _print_table(console, "Out of memory" + f", {times:,} times" * (times > 1), table)
