# SPDX-License-Identifier: BSD-3-Clause
"""The commands of ``gpumemx`` but ``run`` (gpumemx/_run.py).

Exit status of ``gpumemx check``: 0 gpumemx can
work here; 1 it can't. Of ``gpumemx replay``: 0 every trace was replayed to its end, and fits on
every card that was named; 1 at least one ran out of memory; 2 a file could not be used or written,
or an argument is wrong (2 goes before 1). Of ``gpumemx analyze``: 0, or 2 in the same sense.
130 interrupted. A bad file is one line on stderr, and the other files are still replayed.
"""

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpumemx._console import complain, progress_bar, written
from gpumemx._files import write_whole
from gpumemx._version import __version__
from gpumemx.errors import MissingPackageError, TraceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gpumemx._replay import ReplayResult
    from gpumemx.page import Alive

_GIB = 1 << 30
_WIDTH = 100
# Shorter files are done before a bar could be read.
_LONG_TRACE = 200_000
_MAX_LAG_MS = 3_600_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command but ``run`` and return its exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone. Nothing may fail again when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpumemx", description="GPU memory for PyTorch.")
    parser.add_argument("--version", action="version", version=f"gpumemx {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    commands.add_parser("run", help="run a program with gpumemx as torch's CUDA allocator")
    check = commands.add_parser(
        "check",
        help="whether gpumemx can work here, and with what",
        description="Look at Python, PyTorch, the driver, each GPU and the settings, and say "
        "whether gpumemx can work here.",
        epilog="Exit status: 0 it can, 1 it can't (the reason is the last line). Starts CUDA on "
        "each GPU for a moment.",
    )
    check.set_defaults(run=_check_command)

    replay = commands.add_parser(
        "replay",
        help="what recorded training runs would have needed",
        description="Replay recorded training runs through gpumemx's allocator on a simulated "
        "device, or through a model of torch's own, and say what they would have needed. Needs no "
        "GPU.",
        epilog="Policies: gpumemx; native, torch's own allocator; expandable, the same with "
        "expandable_segments:True. Exit status: 0 all were replayed to their end and fit on every "
        "card, 1 one ran out of memory, 2 a file could not be used or an argument is wrong.",
    )
    replay.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="trace (.npz), or memory snapshot of PyTorch (.pickle)",
    )
    replay.add_argument(
        "--policy",
        type=_policies,
        default=["gpumemx"],
        metavar="NAME,...",
        help="gpumemx, native or expandable, several with commas (default: gpumemx)",
    )
    replay.add_argument(
        "--setting",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY:VALUE",
        help="a setting of the policies that have it, such as max_split_size_mb:128; repeatable",
    )
    replay.add_argument(
        "--gpu",
        type=_card,
        action="append",
        default=[],
        metavar="NAME",
        help='say whether it fits on a card, such as "RTX 4090" or A100-80GB; repeatable, or with '
        "commas",
    )
    replay.add_argument(
        "--capacity",
        type=_capacity,
        metavar="SIZE",
        help="what may be reserved, such as 24GiB (default: no limit)",
    )
    replay.add_argument(
        "--fit",
        action="store_true",
        help="search the smallest capacity that each trace passes in, to 0.1 %%",
    )
    replay.add_argument(
        "--lag",
        type=_lag,
        default=20.0,
        metavar="MS",
        help="milliseconds from queueing work to its completion (default: 20)",
    )
    replay.add_argument(
        "--json",
        metavar="FILE",
        help="also write the figures there; '-' writes them to stdout instead of the tables",
    )
    replay.add_argument(
        "--html",
        metavar="FILE",
        help="also write a page there with live and reserved memory over time (needs plotly)",
    )
    replay.set_defaults(run=_replay_command)

    analyze = commands.add_parser(
        "analyze",
        help="what a memory snapshot of PyTorch says",
        description="Read a file of torch.cuda.memory._dump_snapshot() and say when memory was at "
        "its peak, what was alive then, how fragmented it was and what failed. Needs no GPU and no "
        "torch; nothing in the file is executed.",
        epilog="Exit status: 0 analyzed, 2 the file could not be used, another could not be "
        "written, or an argument is wrong.",
    )
    analyze.add_argument("file", metavar="FILE", help="memory snapshot (.pickle)")
    analyze.add_argument(
        "--device", type=_count, metavar="N", help="only this device (default: all in the file)"
    )
    analyze.add_argument(
        "--top",
        type=_count,
        default=10,
        metavar="N",
        help="rows of a long table (default: 10)",
    )
    analyze.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write all figures to stdout instead of the tables; with FILE, there too",
    )
    analyze.add_argument(
        "--html",
        metavar="FILE",
        help="also write a page there with memory over time and who was alive (needs plotly)",
    )
    analyze.set_defaults(run=_analyze_command)
    return parser


def _check_command(args: argparse.Namespace) -> int:
    from gpumemx._check import check_command

    return check_command()


def _capacity(text: str) -> int:
    from gpumemx import _core

    try:
        size = _core.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return size


def _lag(text: str) -> float:
    try:
        lag = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of milliseconds") from None
    if not 0 <= lag <= _MAX_LAG_MS:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"must be from 0 to {_MAX_LAG_MS} ms (an hour)")
    return lag


def _policies(text: str) -> list[str]:
    from gpumemx._replay import check_policy

    names = list(dict.fromkeys(text.replace(" ", "").lower().split(",")))
    for name in names:
        try:
            check_policy(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _setting(text: str) -> tuple[str, str]:
    key, colon, value = text.replace(" ", "").partition(":")
    if not colon or not key or not value:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY:VALUE")
    return key.lower(), value


def _card(text: str) -> list[str]:
    from gpumemx._gpus import find_gpu

    try:
        return [find_gpu(name).name for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shared_out(policies: "Sequence[str]", given: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the settings of each policy. A setting that none of them has is a ValueError."""
    from gpumemx._replay import settings_for, unknown_setting

    shares = {policy: settings_for(policy, given) for policy in policies}
    for key in given:
        if not any(key in share for share in shares.values()):
            raise ValueError(unknown_setting(key, policies))
    return shares


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return int(text)


def _analyze_command(args: argparse.Namespace) -> int:
    from gpumemx._analyze_command import analyze_command

    return analyze_command(
        args.file, device=args.device, top=args.top, json_file=args.json, html_file=args.html
    )


def _replay_command(args: argparse.Namespace) -> int:
    from gpumemx._replay import check_settings, replay
    from gpumemx.trace import is_snapshot, load_trace

    if args.html is not None:
        from gpumemx.page import require_plotly

        try:
            require_plotly()
        except MissingPackageError as error:
            complain("replay", "--html", str(error))
            return 2

    try:
        settings = _shared_out(args.policy, dict(args.setting))
        for policy, own in settings.items():
            check_settings(policy, own)
    except ValueError as error:
        complain("replay", "--setting", str(error))
        return 2
    cards = list(dict.fromkeys(name for names in args.gpu for name in names))
    results: list[ReplayResult] = []
    snapshots = []
    bad = False
    for file in args.files:
        try:
            trace = load_trace(file)
            for policy, own in settings.items():
                name = Path(file).name + (f" {policy}" if len(settings) > 1 else "")
                worth = len(trace) >= _LONG_TRACE
                with progress_bar(name, len(trace), worth=worth) as progress:
                    result = replay(
                        trace,
                        policy=policy,
                        settings=own,
                        capacity=args.capacity,
                        lag_ms=args.lag,
                        fit=args.fit,
                        gpu=cards,
                        series=args.html is not None,
                        progress=progress,
                    )
                results.append(result)
            if is_snapshot(file):
                snapshots.append(file)
        except TraceError as error:
            complain("replay", error.path, error.reason)
            bad = True

    if args.json is not None:
        text = json.dumps({"results": [r.to_dict() for r in results]}, indent=2) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        elif not written("replay", args.json, lambda: write_whole(args.json, text)):
            bad = True
    if args.html is not None and results:
        bad |= not written("replay", args.html, lambda: _write_page(args.html, results, snapshots))
    if results and args.json != "-":
        _print_tables(results, fit=args.fit or bool(cards))
    if bad:
        return 2
    short = any(r.failed_at is not None or not all(card.fits for card in r.gpus) for r in results)
    return 1 if short else 0


def _write_page(file: str, results: "Sequence[ReplayResult]", snapshots: Sequence[str]) -> None:
    from gpumemx.page import write_page

    names = _names(results)
    series = [
        replace(result.series, chart=name)
        for result, name in zip(results, names, strict=True)
        if result.series is not None
    ]
    title = "gpumemx replay: " + ", ".join(dict.fromkeys(names))
    write_page(file, title, series, _alive(snapshots), [str(result) for result in results])


def _alive(snapshots: Sequence[str]) -> "dict[str, Sequence[Alive]]":
    """Return who was alive at each snapshot's peaks, by the title of their chart."""
    from gpumemx._analyze import analyze

    return {
        f"{Path(file).name}, GPU {device.device}: alive at the peak, by allocation site": (
            device.by_site
        )
        for file in snapshots
        for device in analyze(file).devices
        if device.events
    }


def _print_tables(results: "Sequence[ReplayResult]", *, fit: bool) -> None:
    from rich.console import Console

    terminal = Console()
    width = min(_WIDTH, terminal.width) if terminal.is_terminal else _WIDTH
    console = Console(width=width, highlight=False)
    names = _names(results)
    _print_memory(console, results, names, fit=fit)
    if any(r.gpus for r in results):
        console.print()
        _print_cards(console, results, names)
    # Plain segments are cudaMalloc's, whose time says little: --json has the counts.
    mapped = [i for i, r in enumerate(results) if "map" in r.driver_calls]
    if mapped:
        console.print()
        _print_driver(console, [results[i] for i in mapped], [names[i] for i in mapped])


def _names(results: "Sequence[ReplayResult]") -> list[str]:
    """Return the names without their folders, where that leaves them apart."""
    files = {r.file: Path(r.file).name for r in results}
    count = Counter(files.values())
    return [name if count[name := files[r.file]] == 1 else r.file for r in results]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / _GIB:.3f}"


def _table(console: "Console", title: str, results: "Sequence[ReplayResult]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge = False
    table.padding = (0, 1 if console.width >= _WIDTH else 0, 0, 0)  # closer on 80 columns
    table.add_column("file", overflow="fold")
    if _names_policies(results):
        table.add_column("policy", no_wrap=True)
    return table


def _names_policies(results: "Sequence[ReplayResult]") -> bool:
    return any(r.policy != "gpumemx" for r in results)


def _first_cells(
    result: "ReplayResult", name: str, results: "Sequence[ReplayResult]"
) -> "list[Text]":
    from rich.text import Text

    return [Text(name), *([Text(result.policy)] if _names_policies(results) else [])]


def _print_memory(
    console: "Console", results: "Sequence[ReplayResult]", names: list[str], *, fit: bool
) -> None:
    table = _table(console, "Memory in GiB", results)
    headers = ["events", "peak live", "peak reserved", "ratio", *(["fits in"] if fit else [])]
    for header in (*headers, "failed at"):
        table.add_column(header, justify="right", no_wrap=True)
    for result, name in zip(results, names, strict=True):
        cells = [
            f"{result.events:,}",
            _gib(result.live_peak_bytes),
            _gib(result.reserved_peak_bytes),
            "-" if math.isnan(result.ratio) else f"{result.ratio:.4f}",
        ]
        if fit:
            cells.append(_gib(result.fits_in_bytes))
        cells.append("-" if result.failed_at is None else f"event {result.failed_at:,}")
        table.add_row(*_first_cells(result, name, results), *cells)
    console.print(table)


def _print_cards(console: "Console", results: "Sequence[ReplayResult]", names: list[str]) -> None:
    table = _table(
        console, "Cards, with an estimate of what each leaves to a program, in GiB", results
    )
    table.add_column("card", no_wrap=True)
    for header in ("memory", "usable"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("verdict")
    for result, name in zip(results, names, strict=True):
        for card in result.gpus:
            table.add_row(
                *_first_cells(result, name, results),
                card.name,
                f"{card.total_bytes / _GIB:.2f}",
                f"{card.usable_bytes / _GIB:.2f}",
                str(card),
            )
    console.print(table)


def _print_driver(console: "Console", results: "Sequence[ReplayResult]", names: list[str]) -> None:
    title = "Driver calls, their modelled time in ms, and our own time in ns an event"
    table = _table(console, title, results)
    kinds = {
        "create": "create",
        "map": "map",
        "set_access": "access",
        "unmap": "unmap",
        "release": "release",
    }
    for header in (*kinds.values(), "time", "inline", "growth", "host"):
        table.add_column(header, justify="right", no_wrap=True)
    for result, name in zip(results, names, strict=True):
        seconds = (
            result.driver_seconds,
            result.driver_seconds_inline,
            result.driver_seconds_growth,
        )
        table.add_row(
            *_first_cells(result, name, results),
            *(f"{result.driver_calls[kind]:,}" for kind in kinds),
            *(f"{1e3 * s:,.1f}" for s in seconds),
            f"{result.host_ns_per_event:,.0f}",
        )
    console.print(table)
