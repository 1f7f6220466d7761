# SPDX-License-Identifier: BSD-3-Clause
"""The command ``gpumemx``.

Exit status of ``gpumemx run``: the program's (gpumemx/_run.py). Of ``gpumemx check``: 0 gpumemx can
work here; 1 it can't. Of ``gpumemx replay``: 0 every trace was replayed to its end; 1 at least one
ran out of memory; 2 a file could not be used or written, or an argument is wrong (2 goes before 1);
130 interrupted. A bad file is one line on stderr, and the other files are still replayed.
"""

import argparse
import json
import math
import os
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpumemx._version import __version__
from gpumemx.errors import TraceError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gpumemx._replay import Progress, ReplayResult

_GIB = 1 << 30
_WIDTH = 100
# Shorter files are done before a bar could be read.
_LONG_TRACE = 200_000
_MAX_LAG_MS = 3_600_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:
        # Not argparse's: everything after the program's name is the program's, and so is its end.
        from gpumemx._run import run_command

        return run_command(words[1:])
    args = _parser().parse_args(words)
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
        "device, and say what they would have needed. Needs no GPU.",
        epilog="Exit status: 0 all were replayed to their end, 1 one ran out of memory, 2 a file "
        "could not be used or an argument is wrong.",
    )
    replay.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="trace (.npz), or memory snapshot of PyTorch (.pickle)",
    )
    replay.add_argument(
        "--capacity",
        type=_capacity,
        metavar="SIZE",
        help="memory of the simulated device, such as 24GiB (default: no limit)",
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
    replay.set_defaults(run=_replay_command)
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


def _complain(what: str, reason: str) -> None:
    print(" ".join(f"gpumemx replay: {what}: {reason}".split("\n")), file=sys.stderr, flush=True)


def _replay_command(args: argparse.Namespace) -> int:
    from gpumemx._replay import replay
    from gpumemx.trace import load_trace

    results: list[ReplayResult] = []
    bad = False
    for file in args.files:
        try:
            trace = load_trace(file)
            with _progress_bar(Path(file).name, len(trace)) as progress:
                result = replay(
                    trace,
                    capacity=args.capacity,
                    lag_ms=args.lag,
                    fit=args.fit,
                    progress=progress,
                )
            results.append(result)
        except TraceError as error:
            _complain(error.path, error.reason)
            bad = True

    if args.json is not None:
        text = json.dumps({"results": [r.to_dict() for r in results]}, indent=2) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            try:
                _write(args.json, text)
            except OSError as error:
                _complain(args.json, error.strerror or str(error))
                bad = True
    if results and args.json != "-":
        _print_tables(results, fit=args.fit)
    if bad:
        return 2
    return 1 if any(r.failed_at is not None for r in results) else 0


def _write(name: str, text: str) -> None:
    """Write a file whole or not at all; through a link, and into a device or pipe, as it stands."""
    path = Path(os.path.realpath(name))
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            path.write_text(text)
            return
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)  # mkstemp's own is 0600
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _progress_bar(name: str, events: int) -> Iterator["Progress | None"]:
    """Show a bar on stderr, where somebody sees it and the file is long; else yield None."""
    if events < _LONG_TRACE or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=events)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total)

        yield show


def _print_tables(results: "Sequence[ReplayResult]", *, fit: bool) -> None:
    from rich.console import Console

    terminal = Console()
    width = min(_WIDTH, terminal.width) if terminal.is_terminal else _WIDTH
    console = Console(width=width, highlight=False)
    names = _names(results)
    _print_memory(console, results, names, fit=fit)
    console.print()
    _print_driver(console, results, names)


def _names(results: "Sequence[ReplayResult]") -> list[str]:
    """Return the names without their folders, where that leaves them apart."""
    short = [Path(r.file).name for r in results]
    count = Counter(short)
    return [s if count[s] == 1 else r.file for s, r in zip(short, results, strict=True)]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / _GIB:.3f}"


def _table(console: "Console", title: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge = False
    table.padding = (0, 1 if console.width >= _WIDTH else 0, 0, 0)  # closer on 80 columns
    table.add_column("file", overflow="fold")
    return table


def _print_memory(
    console: "Console", results: "Sequence[ReplayResult]", names: list[str], *, fit: bool
) -> None:
    from rich.text import Text

    table = _table(console, "Memory in GiB")
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
        table.add_row(Text(name), *cells)
    console.print(table)


def _print_driver(console: "Console", results: "Sequence[ReplayResult]", names: list[str]) -> None:
    from rich.text import Text

    title = "Driver calls, their modelled time in ms, and our own time in ns an event"
    table = _table(console, title)
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
            Text(name),
            *(f"{result.driver_calls[kind]:,}" for kind in kinds),
            *(f"{1e3 * s:,.1f}" for s in seconds),
            f"{result.host_ns_per_event:,.0f}",
        )
    console.print(table)
