# SPDX-License-Identifier: BSD-3-Clause
"""What the commands share: complaints, files they write, progress bars."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[str, int, int], object]


def shown(name: str) -> str:
    """Return a file's name as text that every terminal and file takes."""
    return name.encode(errors="backslashreplace").decode()


def complain(command: str, what: str, reason: str) -> None:
    """Print one line on stderr."""
    line = " ".join(f"gpumemx {command}: {shown(what)}: {reason}".split("\n"))
    print(line, file=sys.stderr, flush=True)


def written(command: str, file: str, write: Callable[[], None]) -> bool:
    """Write a file and return True, or complain and return False."""
    try:
        write()
    except OSError as error:
        complain(command, file, error.strerror or str(error))
        return False
    return True


@contextmanager
def progress_bar(name: str, total: int, *, worth: bool) -> Iterator[Show | None]:
    """Show a bar on stderr, where somebody sees it and it is worth one; else yield None."""
    if not worth or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total)

        yield show
