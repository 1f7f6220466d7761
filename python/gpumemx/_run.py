# SPDX-License-Identifier: BSD-3-Clause
"""``gpumemx run``: a program as ``python`` runs it, with gpumemx installed before it begins."""

import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

_USAGE = "usage: gpumemx run [--set KEY:VALUE]... [--conf TEXT] (SCRIPT | -m MODULE) [ARGUMENT]..."
_HELP = f"""{_USAGE}

Make gpumemx torch's CUDA allocator, then run a Python program unchanged: as a script, or with -m as
a module. Its arguments, paths and exit status are what they would be under python.

  --set KEY:VALUE  a setting, such as cap:20GiB; may be repeated
  --conf TEXT      several, as in GPUMEMX_CONF: KEY:VALUE,KEY:VALUE
  -h, --help       this text

With torchrun: torchrun --no-python gpumemx run train.py, or torchrun -m gpumemx run train.py.
Exit status: the program's; 1 when gpumemx cannot be installed, 2 for a wrong option or setting.
"""


class _UsageError(Exception):
    pass


def run_command(words: Sequence[str]) -> int:
    """Do ``gpumemx run`` with what stands after ``run``. Ends as the program ends, or returns."""
    from gpumemx.allocator import install_allocator
    from gpumemx.errors import InstallError, SettingError

    try:
        settings, is_module, command = _parse(list(words))
    except _UsageError as error:
        print(f"{_USAGE}\ngpumemx run: error: {error}", file=sys.stderr)
        return 2
    if not command:
        sys.stdout.write(_HELP)
        return 0
    try:
        install_allocator(late=False, **settings)
    except SettingError as error:
        print(f"gpumemx run: {error}", file=sys.stderr)
        return 2
    except InstallError as error:
        print(f"gpumemx run: {error}", file=sys.stderr)
        return 1
    try:
        if is_module:
            _run_module(command)
        else:
            _run_script(command)
    except SystemExit:
        raise
    except BaseException:
        _hide_our_frames()
        raise
    return 0


def _parse(words: list[str]) -> tuple[dict[str, str], bool, list[str]]:
    """Return the settings, whether a module is meant, and the program with its arguments."""
    settings: dict[str, str] = {}
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--set", "--conf"):
            if not equals:
                if not words:
                    raise _UsageError(f"{name} needs a value")
                value = words.pop(0)
            items = value.split(",") if name == "--conf" else [value]
            for item in filter(None, map(str.strip, items)):
                key, colon, text = item.partition(":")
                if not colon or not key.strip():
                    raise _UsageError(f"'{item}' is no setting; write KEY:VALUE, as in cap:20GiB")
                settings[key.strip().lower()] = text.strip()
        elif word in ("-h", "--help"):
            return {}, False, []
        elif word == "-m":
            if not words:
                raise _UsageError("-m needs a module")
            return settings, True, words
        elif word.startswith("-m") and not word.startswith("--"):
            return settings, True, [word[2:], *words]
        elif word == "--":
            break
        elif word.startswith("-") and word != "-":
            raise _UsageError(f"there is no option {word}")
        else:
            words.insert(0, word)
            break
    if not words:
        raise _UsageError("there is no program to run")
    return settings, False, words


def _fresh_main() -> types.ModuleType:
    """Put an empty ``__main__`` in the place of ours, and leave it there until the process ends."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    return module


def _set_path(first: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first


def _run_module(command: list[str]) -> None:
    # What python -m calls; the public runpy.run_module() takes __main__ away again before threads
    # and exit handlers are done with it.
    _fresh_main()
    sys.argv = list(command)
    _set_path(str(Path.cwd()))
    runpy._run_module_as_main(command[0], alter_argv=True)  # type: ignore[attr-defined]


def _run_script(command: list[str]) -> None:
    path = command[0]
    module = _fresh_main()
    sys.argv = list(command)
    if Path(path).is_dir() or path.endswith((".zip", ".pyz")):
        # A folder or archive with a __main__.py, found as python does.
        _set_path(path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _set_path(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    # As python does it: absolute, else as it was written.
    full_path = os.path.join(os.getcwd(), path.removeprefix("./"))  # noqa: PTH109, PTH118
    try:
        with io.open_code(full_path) as file:
            source = file.read()
    except OSError as error:
        print(
            f"gpumemx run: can't open file '{path}': [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    module.__dict__.update(
        __file__=full_path, __cached__=None, __loader__=SourceFileLoader("__main__", full_path)
    )
    exec(compile(source, full_path, "exec", dont_inherit=True), module.__dict__)


_RUNPY = {runpy.__file__, "<frozen runpy>"}


def _hide_our_frames() -> None:
    """Let the traceback of an error that nobody catches begin in the program."""
    shown = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        first, entry = trace, trace
        while entry is not None:
            if entry.tb_frame.f_code.co_filename == __file__:
                first = entry.tb_next
            entry = entry.tb_next
        while first is not None and first.tb_frame.f_code.co_filename in _RUNPY:
            first = first.tb_next
        shown(kind, error.with_traceback(first), first)

    sys.excepthook = show
