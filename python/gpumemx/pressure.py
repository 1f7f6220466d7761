# SPDX-License-Identifier: BSD-3-Clause
"""Functions of the program that are asked to free memory before a request fails."""

import _thread
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from gpumemx import _adapter

_log = logging.getLogger("gpumemx")


@dataclass(frozen=True)
class MemoryPressure:
    """A request that cannot be served as things stand. Bytes."""

    device: int
    size: int
    """What was asked for."""
    stream: int
    """Handle of the CUDA stream that it is for; 0 is the default stream."""
    attempt: int
    """1 for the first time that this request asks."""
    free: int
    """What the driver could still hand out; 0 when it could not be asked."""
    cached: int
    """Unused memory of the allocator, which did not do."""


Callback = Callable[[MemoryPressure], object]


class PressureCallback:
    """A function that is asked; made by `on_memory_pressure`. As a context manager: for a block."""

    def __init__(self, function: Callback) -> None:
        self._function = function

    def remove(self) -> None:
        """Ask it no more. A call that goes on in another thread comes to its end."""
        with _mu:
            if self in _callbacks:
                _callbacks.remove(self)

    def __enter__(self) -> "PressureCallback":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


_mu = threading.Lock()  # not held while a function runs
_callbacks: list[PressureCallback] = []
_connected = False
_here = threading.local()


def on_memory_pressure(callback: Callback) -> PressureCallback:
    """Ask a function to free memory when a request cannot be served, before it fails.

    It is called when the driver has refused, all unused memory has been used or given back and
    streams have been waited for, on the thread that makes the request. Then the request is tried
    once more, unless all functions have returned False.

    Parameters
    ----------
    callback
        Called with a `MemoryPressure`. Dropping tensors is enough to free memory. It may return
        False to say that it has freed nothing.

    Returns
    -------
    PressureCallback
        With ``remove()``, and to be used in a ``with`` statement. The function is asked as long
        as the process lives otherwise.

    Notes
    -----
    Several are asked in the order in which they were added. No lock of the allocator is held, so
    the function may free and allocate; what it allocates itself asks nobody. An exception in it is
    logged, and the request goes on as if nothing had been freed. Nobody is asked for more than the
    device has in all. With torch's own allocator it is never called.

    Examples
    --------
    >>> import gpumemx
    >>> models = {"old": "weights", "new": "weights"}
    >>> def unload(pressure):
    ...     return models.pop("old", None) is not None
    >>> with gpumemx.on_memory_pressure(unload):
    ...     pass  # serve
    """
    if not callable(callback):
        raise TypeError(f"on_memory_pressure() takes a function, not {type(callback).__name__}")
    entry = PressureCallback(callback)
    with _mu:
        _callbacks.append(entry)
    if adapter := _adapter.installed():
        connect(adapter)
    return entry


def connect(adapter: _adapter.Adapter) -> None:
    """Have an allocator ask, if there is anybody to be asked and it does not yet."""
    global _connected
    with _mu:
        if _connected or not _callbacks:
            return
        _connected = True
    adapter.on_memory_pressure(_ask)


def _ask(device: int, size: int, stream: int, attempt: int, free: int, cached: int) -> bool:
    if getattr(_here, "asking", False):
        return False
    with _mu:
        callbacks = list(_callbacks)
    pressure = MemoryPressure(device, size, stream, attempt, free, cached)
    freed = False
    _here.asking = True
    try:
        for entry in callbacks:
            try:
                freed = entry._function(pressure) is not False or freed
            except KeyboardInterrupt:  # not lost, but not in place of the request's own end
                _thread.interrupt_main()
            except BaseException:
                _log.exception("a callback of on_memory_pressure() failed")
    finally:
        _here.asking = False
    return freed
