# SPDX-License-Identifier: BSD-3-Clause
"""Making gpumemx torch's CUDA allocator, and what it is set to."""

import logging
import os
import sys
import traceback
from dataclasses import asdict, dataclass

from gpumemx import _adapter
from gpumemx.errors import InstallError, SettingError

_log = logging.getLogger("gpumemx")
_disabled_was_logged = False
_first_use: str | None = None
_watching = False


@dataclass(frozen=True)
class Setting:
    """One setting and where its value is from."""

    key: str
    value: str
    """As it would be written in GPUMEMX_CONF."""
    source: str
    """``default``, ``GPUMEMX_CONF``, ``install_allocator()`` or the name of torch's variable."""
    note: str
    """What it means and accepts; of a key of torch's, what becomes of it under gpumemx."""

    def __str__(self) -> str:
        return f"{self.key}:{self.value} ({self.source})"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def install_allocator(*, late: bool = False, **settings: str | int | float | bool) -> None:
    """Make gpumemx the allocator of CUDA memory for torch, for the life of the process.

    Parameters
    ----------
    late
        Install also when CUDA has started: new memory comes from gpumemx, blocks that exist stay
        with torch's own allocator until they are freed, and cached memory of it stays there.
    **settings
        Override GPUMEMX_CONF and torch's variables; `settings` lists the names. Sizes are bytes or
        text such as ``"8GiB"``.

    Raises
    ------
    SettingError
        A ``ValueError``: a setting does not exist (the nearest name is in the text) or has a wrong
        value, wherever it was set, or an environment variable GPUMEMX_... means nothing.
    InstallError
        A ``RuntimeError``: PyTorch is missing, has no adapter or no CUDA; it runs on another
        allocator; CUDA has started and `late` is False; or gpumemx is installed with other settings
        than those named here.

    Notes
    -----
    Starts no CUDA, unless it is late. Call it after the imports and before the first CUDA tensor,
    while no other thread uses CUDA. A second call is fine when what it sets is in force already.
    With ``GPUMEMX_DISABLE=1`` it does nothing and logs that once.

    Examples
    --------
    >>> import gpumemx
    >>> gpumemx.install_allocator(cap="20GiB")  # doctest: +SKIP
    >>> gpumemx.install_allocator(capp="20GiB")
    Traceback (most recent call last):
    gpumemx.errors.SettingError: ... there is no setting 'capp'; the nearest name is 'cap'
    """
    if _is_disabled():
        return
    from gpumemx import _core

    if unknown := _core.unknown_environment(list(os.environ)):
        raise SettingError("; ".join(unknown))
    conf = os.environ.get("GPUMEMX_CONF", "")
    arguments = {key: _text(key, value) for key, value in settings.items()}
    try:
        wanted = {e["key"]: e["value"] for e in _core.gather_settings(conf, arguments)}
    except ValueError as error:
        raise SettingError(str(error)) from None

    adapter = _adapter.load()
    if adapter.is_installed():
        _check_same(
            adapter, {key.strip().lower(): wanted[key.strip().lower()] for key in arguments}
        )
        _connect_pressure(adapter)
        return
    if adapter.cuda_started() and not late:
        raise InstallError(_too_late())
    try:
        adapter.install(conf, arguments, late)
    except ValueError as error:
        raise SettingError(str(error)) from None
    except RuntimeError as error:
        raise InstallError(f"gpumemx cannot be installed: {error}") from None
    _connect_pressure(adapter)


def is_installed() -> bool:
    """Say whether gpumemx is torch's CUDA allocator in this process. Imports nothing.

    Examples
    --------
    >>> import gpumemx
    >>> gpumemx.is_installed()
    False
    """
    return _adapter.installed() is not None


def settings() -> list[Setting]:
    """Return what is in force, or what would be if gpumemx were installed now.

    Returns
    -------
    list of Setting
        gpumemx's own in a fixed order, then those of torch's keys that are set.

    Raises
    ------
    SettingError
        Before the installation: GPUMEMX_CONF or torch's variable has a mistake.

    Examples
    --------
    >>> import gpumemx
    >>> print(next(s for s in gpumemx.settings() if s.key == "cap"))
    cap:none (default)
    """
    if adapter := _adapter.installed():
        return [Setting(**entry) for entry in adapter.settings()]
    from gpumemx import _core

    try:
        entries = _core.gather_settings(os.environ.get("GPUMEMX_CONF", ""), {})
    except ValueError as error:
        raise SettingError(str(error)) from None
    return [Setting(**entry) for entry in entries]


def _connect_pressure(adapter: _adapter.Adapter) -> None:
    # Without the module nobody is to be asked. If another thread is importing it, that is awaited.
    if "gpumemx.pressure" in sys.modules:
        from gpumemx import pressure

        pressure.connect(adapter)


def _is_disabled() -> bool:
    global _disabled_was_logged
    value = os.environ.get("GPUMEMX_DISABLE", "").strip().lower()
    if value in ("", "0", "false", "off", "no"):
        return False
    if value not in ("1", "true", "on", "yes"):
        raise SettingError(f"GPUMEMX_DISABLE: '{value}' is neither 1 nor 0")
    if not _disabled_was_logged:
        _disabled_was_logged = True
        _log.warning("GPUMEMX_DISABLE is set: torch keeps its own CUDA allocator")
    return True


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise TypeError(
        f"install_allocator(): {key} is a str, int, float or bool, not {type(value).__name__}"
    )


def _check_same(adapter: _adapter.Adapter, wanted: dict[str, str]) -> None:
    there = {e["key"]: e for e in adapter.settings()}
    for key, value in wanted.items():
        if there[key]["value"] != value:
            raise InstallError(
                f"gpumemx is installed already with {key}:{there[key]['value']} (from "
                f"{there[key]['source']}), and settings cannot change while a process runs; "
                f"{key}:{value} has to be given to the first install_allocator() or in GPUMEMX_CONF"
            )


# --- what started CUDA


def watch_cuda_start() -> None:
    """Remember who starts CUDA, if torch is imported already and CUDA has not started.

    torch calls what was given to ``_lazy_call`` when it starts CUDA; nothing of torch is replaced.
    """
    global _watching
    cuda = sys.modules.get("torch.cuda")
    lazy_call = getattr(cuda, "_lazy_call", None)
    try:
        if _watching or cuda is None or lazy_call is None or cuda.is_initialized():
            return
        lazy_call(_note_first_use)
        _watching = True
    except Exception:  # only a better message is lost
        return


def _note_first_use() -> None:
    global _first_use
    try:
        torch_folder = os.path.dirname(sys.modules["torch"].__file__ or "")  # noqa: PTH120
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(torch_folder):
            frame = frame.f_back
        where = traceback.extract_stack(frame, limit=1)[0]
        _first_use = f"{where.filename}, line {where.lineno}"
        if where.line:
            _first_use += f": {where.line}"
    except Exception:  # raising here would keep CUDA from starting
        return


def _too_late() -> str:
    what = "CUDA has started already in this process"
    if _first_use is not None:
        what += f" (by {_first_use})"
    elif _watching:
        what += " (not by torch.cuda: an extension or another library did)"
    else:
        what += " (what did is not known: gpumemx was not yet imported, or before torch)"
    if tensors := _live_tensors():
        what += f"; {tensors}"
    return (
        f"{what}. Call gpumemx.install_allocator() right after the imports (in a notebook: restart "
        "the kernel first), or start the program with 'gpumemx run', or use install_allocator(late"
        "=True): new memory then comes from gpumemx, and what exists stays with torch's allocator"
    )


def _live_tensors() -> str:
    """Name a CUDA tensor that is alive, for somebody who looks for what made it."""
    import gc

    tensor = sys.modules["torch"].Tensor
    found = []
    for thing in gc.get_objects():
        try:
            if issubclass(type(thing), tensor) and thing.is_cuda:
                found.append(thing)
        except Exception:  # a half-made or a strange object
            continue
    if not found:
        return ""
    first = found[0]
    size = "x".join(map(str, first.shape)) or "scalar"
    kind = str(first.dtype).removeprefix("torch.")
    return f"{len(found)} CUDA tensors are alive, one of them {size} {kind} on {first.device}"
