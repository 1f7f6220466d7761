# SPDX-License-Identifier: BSD-3-Clause
"""Writing files."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def write_whole(name: str, text: str) -> None:
    """Write a file whole or not at all; through a link, and into a device or pipe, as it stands."""
    path = Path(os.path.realpath(name))
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            path.write_text(text, encoding="utf-8")
            return
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)  # mkstemp's own is 0600
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
