# SPDX-License-Identifier: BSD-3-Clause
"""Recorded runs: ``.npz`` files and PyTorch's memory snapshots, every mistake in one clear line."""

import os
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpumemx import _core
from gpumemx.errors import TraceError

_DTYPES = {"op": np.int64, "size": np.int64, "stream": np.int16, "time_us": np.int64}


@dataclass(frozen=True, eq=False)
class Trace:
    """One recorded run, an event a row.

    Make one with `load_trace`, or from arrays of the types below; it is checked by whoever uses it.
    The arrays must not be written to afterwards.
    """

    op: NDArray[np.int64]
    """``k >= 0`` allocates into slot ``k``, ``~k`` frees what slot ``k`` holds."""
    size: NDArray[np.int64]
    """Bytes asked for; not looked at where ``op`` frees."""
    stream: NDArray[np.int16]
    """Index of the stream."""
    time_us: NDArray[np.int64]
    """Microseconds from the first event."""
    slots: int
    """Number of slots, each of which holds one block at a time."""
    path: str = "<trace>"
    """Where it came from; names it in results and errors."""

    def __len__(self) -> int:
        return len(self.op)

    def mistake(self) -> str | None:
        """Say what is wrong with the trace, in one sentence, or None."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _DTYPES}
        for name, dtype in _DTYPES.items():
            if mistake := _array_mistake(name, arrays[name], np.dtype(dtype)):
                return mistake
        # Beyond 64 bits is out of range like any number that is too large.
        slots = max(-(2**63), min(self.slots, 2**63 - 1))
        return _core.validate_trace(**arrays, slots=slots)


def load_trace(path: str | os.PathLike[str], *, device: int | None = None) -> Trace:
    """Read and check a recorded run.

    Parameters
    ----------
    path
        Either an ``.npz`` file with the arrays ``op``, ``size``, ``time_us`` (int64) and ``stream``
        (int16), one-dimensional and of one length, and the number ``slots``; other arrays in it are
        not looked at. Or a memory snapshot that ``torch.cuda.memory._dump_snapshot(path)`` wrote,
        of any torch since 2.0: what was live before its history begins is allocated first.
    device
        Which device's history to take from a snapshot. Default: the one with the most events, whose
        index `Trace.path` then names if there are several.

    Returns
    -------
    Trace
        Consistent: it can be replayed.

    Raises
    ------
    TraceError
        The file is missing, truncated, of another kind, or inconsistent.

    Notes
    -----
    Never unpickles: a file from anywhere may be read.

    Examples
    --------
    >>> import gpumemx
    >>> trace = gpumemx.load_trace("examples/traces/gnn_sampling.npz")
    >>> len(trace.op), trace.slots
    (9161, 44)
    """
    name = os.fspath(path)
    if is_snapshot(name):
        return _load_snapshot(name, device)
    arrays = _read(name)
    for key in (*_DTYPES, "slots"):
        if key not in arrays:
            raise TraceError(name, f"not a trace: it has no array '{key}'")
    slots = arrays.pop("slots")
    if slots.ndim != 0 or slots.dtype.kind not in "iu":
        raise TraceError(name, f"'slots' is {_describe(slots)}, not one whole number")
    for array in arrays.values():
        array.flags.writeable = False
    trace = Trace(**arrays, slots=int(slots), path=name)
    if mistake := trace.mistake():
        raise TraceError(name, mistake)
    return trace


def is_snapshot(name: str) -> bool:
    """Say whether the file is one, or is named like one so that its mistake is that of one."""
    if name.lower().endswith((".pickle", ".pkl")):
        return True
    try:
        with open(name, "rb") as file:  # noqa: PTH123  (also takes names that are no paths)
            return file.read(1) == b"\x80"
    except OSError:
        return False  # whatever it is, the other reader says it


def _load_snapshot(name: str, device: int | None) -> Trace:
    try:
        traces = {found["device"]: found for found in _core.snapshot_traces(name)}
    except ValueError as error:
        raise TraceError(name, str(error)) from error
    if device is None:
        device = max(traces, key=lambda index: len(traces[index]["op"]))
    elif device not in traces:
        known = ", ".join(map(str, sorted(traces)))
        raise TraceError(name, f"no history of device {device}; there is one of {known}")
    found = traces[device]
    arrays: dict[str, Any] = {key: found[key] for key in _DTYPES}  # type: ignore[literal-required]
    for array in arrays.values():
        array.flags.writeable = False
    path = name if len(traces) == 1 else f"{name} (device {device})"
    return Trace(**arrays, slots=found["slots"], path=path)


def _read(name: str) -> dict[str, Any]:
    """Return the arrays of the trace that the file has, whatever they are."""
    try:
        with open(name, "rb") as file:  # noqa: PTH123  (also takes names that are no paths)
            if file.read(4) != b"PK\x03\x04":
                raise TraceError(name, "not an .npz file")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                wanted = [key for key in (*_DTYPES, "slots") if key in archive.files]
                return {key: _as_array(name, key, archive[key]) for key in wanted}
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(name, error.strerror or str(error)) from error
    except zipfile.BadZipFile as error:
        raise TraceError(name, f"truncated or damaged ({error})") from error
    except ValueError as error:
        if "allow_pickle" in str(error):
            reason = "it has an array of Python objects, which is never read"
        else:
            reason = f"truncated or damaged ({error})"
        raise TraceError(name, reason) from error
    # A damaged archive can fail anywhere in zipfile, zlib or numpy's parser (zlib.error, EOFError,
    # NotImplementedError, MemoryError, ...); whatever it is, this file cannot be read.
    except Exception as error:
        text = str(error) or type(error).__name__
        raise TraceError(name, f"truncated or damaged ({text})") from error


def _as_array(name: str, key: str, value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):  # a member that is no .npy file comes as bytes
        raise TraceError(name, f"'{key}' is not an array")
    return value


def _describe(array: NDArray[Any]) -> str:
    return f"{array.ndim}-dimensional of {array.dtype}"


def _array_mistake(name: str, array: Any, dtype: "np.dtype[Any]") -> str | None:
    if not isinstance(array, np.ndarray):
        return f"'{name}' is {type(array).__name__}, not an array"
    if array.ndim != 1 or array.dtype != dtype:
        return f"'{name}' is {_describe(array)}, not 1-dimensional of {dtype}"
    if not (array.flags.c_contiguous and array.flags.aligned):
        return f"'{name}' is not contiguous: use numpy.ascontiguousarray"
    return None
