# SPDX-License-Identifier: BSD-3-Clause
"""Going on after an out-of-memory error, in the same process.

An error keeps alive what the calls that it ended had in their variables (``gpumemx._frames``), so
a retry with half the batch fails too. Here these variables are dropped, cycles collected and the
cache given back, and only then is anything tried again.
"""

import functools
import gc
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType, TracebackType
from typing import Any, TypeVar, cast, overload

from gpumemx import _adapter, _frames
from gpumemx._device import Device, device_index
from gpumemx._frames import ClearedFrame
from gpumemx.errors import RecoveryError

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("gpumemx")
_MOST_FRAMES_NAMED = 3
_MOST_DEVICES = 64


@dataclass(frozen=True)
class Recovered:
    """What `recover` did."""

    frames: tuple[ClearedFrame, ...] = ()
    """Calls that were over and whose variables were dropped."""
    collected: int = 0
    """Objects in reference cycles that the garbage collector found."""
    freed: int = 0
    """Bytes of device memory in tensors that were freed."""
    released: int = 0
    """Bytes of unused memory that went back to the devices."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors among the variables that were dropped, on any device."""
        return sum(frame.tensor_bytes for frame in self.frames)

    def __str__(self) -> str:
        freed = f"{_size(self.freed)} of device memory freed, {_size(self.released)} given back"
        held = sorted((f for f in self.frames if f.tensor_bytes), key=lambda f: -f.tensor_bytes)
        if not held:
            return f"errors held no tensors; {freed}"
        named = ", ".join(
            f"{_size(frame.tensor_bytes)} in {frame}" for frame in held[:_MOST_FRAMES_NAMED]
        )
        more = (
            f" and {len(held) - _MOST_FRAMES_NAMED} more" if len(held) > _MOST_FRAMES_NAMED else ""
        )
        via = " and ".join(dict.fromkeys(frame.via for frame in held))
        return f"{_size(self.tensor_bytes)} of tensors held by {via}: {named}{more}; {freed}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def recover(error: BaseException | None = None, *, device: Device = None) -> Recovered:
    """Free what a failed attempt has left behind, so that another one can be made.

    Drops the variables of calls that are over and are kept by an error: by `error`, the one that is
    being handled, their causes and contexts, the last one of an interactive session
    (``sys.last_exc``), and every out-of-memory error that the program keeps anywhere. Then it runs
    the garbage collector and gives unused memory back to the device. Calls that still go on, of any
    thread, and generators and coroutines that can be resumed keep their variables.

    Parameters
    ----------
    error
        The error that was caught. Default: the one that is being handled, if any.
    device
        Whose unused memory to give back: an index, a name or a ``torch.device``. Default: all.

    Returns
    -------
    Recovered
        What held the memory and how much came free.

    Raises
    ------
    RecoveryError
        ``torch.distributed`` is in use: what the other ranks do is not known here.

    Notes
    -----
    The errors stay readable, only a debugger can no longer look at these variables. The variables
    of the function that calls this stay, so an attempt should be a function of its own. Waits for
    queued work, unless a CUDA graph is being captured. Works with torch's own allocator, too.

    Examples
    --------
    >>> import gpumemx
    >>> def step(size):
    ...     activations = bytearray(size)
    ...     raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    >>> try:
    ...     step(1024)
    ... except RuntimeError as error:
    ...     print(gpumemx.recover(error).frames[-1].function)
    step
    """
    _refuse_ranks("recover()")
    only = None if device is None else device_index(device)
    before = _live_bytes()
    frames = _frames.clear(error)
    collected = gc.collect()
    freed = max(0, before - _live_bytes())
    return Recovered(tuple(frames), collected, freed, _give_back(only))


class oom_guard:  # noqa: N801  # used like a function
    """Leave a block of code when it runs out of memory, and free what it held.

    The program goes on behind the block; `failed` tells whether the block came to its end. Other
    errors pass.

    Parameters
    ----------
    suppress
        False: the error is raised again, after all was freed that calls inside the block held.
    device
        Whose unused memory to give back; default: all devices.

    Raises
    ------
    RecoveryError
        On entry: ``torch.distributed`` is in use.

    Notes
    -----
    A variable that was assigned in the block itself keeps its value, so the work should be a
    function that is called there. What ran out of memory is logged as a warning. An error that was
    raised ``from`` an out-of-memory error counts as one.

    Examples
    --------
    >>> import gpumemx
    >>> def step(size):
    ...     if size > 16:
    ...         raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    ...     return size
    >>> with gpumemx.oom_guard() as guard:
    ...     done = step(32)
    >>> if guard.failed:
    ...     done = step(16)
    >>> done
    16
    """

    def __init__(self, *, suppress: bool = True, device: Device = None) -> None:
        self._suppress = suppress
        self._device = device
        self._forget()

    def _forget(self) -> None:
        self.error: BaseException | None = None
        """What was raised in the block, without its traceback, which would hold memory."""
        self.traceback: str = ""
        """The traceback in words."""
        self.recovered: Recovered | None = None
        """What was freed."""

    @property
    def failed(self) -> bool:
        """Whether the block ran out of memory."""
        return self.recovered is not None

    def __enter__(self) -> "oom_guard":
        _refuse_ranks("oom_guard()")
        self._forget()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or not _frames.caused_by_out_of_memory(error):
            return False
        _refuse_ranks("oom_guard()")
        text = "".join(traceback.format_exception(error))
        self.recovered = recover(error, device=self._device)
        self.traceback = text
        if not self._suppress:
            return False
        # Frames hold those of their callers: with any of these three, the guard would hold the
        # function that it stands in, and that the guard.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        self.error = error
        _log.warning("left a block that ran out of memory (%s): %s", self.recovered, error)
        return True


@overload
def retry_on_oom(function: F, /) -> F: ...
@overload
def retry_on_oom(
    *,
    batch_size: int | None = None,
    minimum: int = 1,
    search: bool = False,
    attempts: int = 1,
    on_retry: "Callable[[Retry], object] | None" = None,
) -> Callable[[F], F]: ...
def retry_on_oom(
    function: Callable[..., Any] | None = None,
    /,
    *,
    batch_size: int | None = None,
    minimum: int = 1,
    search: bool = False,
    attempts: int = 1,
    on_retry: "Callable[[Retry], object] | None" = None,
) -> Any:
    """Call a function again when it runs out of memory, with half the batch.

    The function has a parameter ``batch_size``, which callers leave out, or give to start
    elsewhere. It begins with `batch_size`, is halved until the function comes to its end, and what
    fits is remembered for the next call. Without `batch_size` the function is called again as it
    was.

    If the function has a parameter ``accumulation_steps`` too, it gets the number of batches that
    make up the first size. The sizes are then divisors of it, so that the effective batch stays the
    same.

    Parameters
    ----------
    batch_size
        The size to begin with.
    minimum
        The smallest size to try.
    search
        Look for the largest size that fits, instead of halving only: calls after the first success
        try sizes between it and the smallest that failed, until they are a sixteenth apart.
    attempts
        Without `batch_size`: how many times to call it again.
    on_retry
        Called with the `Retry` before each further attempt, for instance to reset gradients.

    Returns
    -------
    function
        With an attribute ``retry``, a `Retry`.

    Raises
    ------
    TypeError
        When decorating: the function has no parameter ``batch_size``, or is a generator.
    ValueError
        A size or a number of attempts makes no sense.
    RecoveryError
        When called: ``torch.distributed`` is in use, and ranks would have to agree on a size.

    Notes
    -----
    An attempt starts from the beginning, so what the function changed before it failed is its
    business: a step begins with ``zero_grad()`` and ends with ``step()``. The error is raised when
    no size is left. Coroutine functions, any thread.

    Examples
    --------
    >>> import gpumemx
    >>> @gpumemx.retry_on_oom(batch_size=64)
    ... def step(samples, batch_size, accumulation_steps):
    ...     if batch_size > 20:
    ...         raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    ...     return batch_size, accumulation_steps
    >>> step([])
    (16, 4)
    >>> step.retry.batch_size
    16
    """
    if function is not None:
        return _decorate(function, Retry(function.__qualname__, None, 1, False, 1, None))
    for name, value in (("batch_size", batch_size), ("minimum", minimum), ("attempts", attempts)):
        if value is not None and (isinstance(value, bool) or int(value) != value or value < 1):
            raise ValueError(f"retry_on_oom(): {name} is a whole number from 1 on, not {value!r}")
    if batch_size is not None and minimum > batch_size:
        raise ValueError(
            f"retry_on_oom(): the minimum {minimum} is more than the batch_size {batch_size}"
        )

    def decorate(function: F) -> F:
        retry = Retry(function.__qualname__, batch_size, minimum, search, attempts, on_retry)
        return _decorate(function, retry)

    return decorate


class Retry:
    """What a function decorated with `retry_on_oom` has learned; its attribute ``retry``."""

    def __init__(
        self,
        name: str,
        start: int | None,
        minimum: int,
        search: bool,
        attempts: int,
        on_retry: "Callable[[Retry], object] | None",
    ) -> None:
        self.name = name
        self._start = start
        self._minimum = minimum
        self._search = search
        self._attempts = attempts
        self._on_retry = on_retry
        self._lock = threading.Lock()
        self._divisors = False
        self.forget()

    def forget(self) -> None:
        """Begin again with the first size, for instance on another device."""
        with self._lock:
            self.fits: int | None = None
            """The largest size that came to its end and is below all that failed."""
            self.smallest_failed: int | None = None
            self.recovered: Recovered | None = None
            """What was freed after the last failure."""

    @property
    def batch_size(self) -> int | None:
        """The size that the next call begins with."""
        return None if self._start is None else self._first(self._start)

    def __repr__(self) -> str:
        return (
            f"<gpumemx.Retry of {self.name}: batch_size {self.batch_size}, fits {self.fits}, "
            f"smallest_failed {self.smallest_failed}>"
        )

    # --- sizes; each is one of _sizes(start), so that they divide it where they have to

    def _sizes(self, start: int, low: int, high: int) -> Iterator[int]:
        """Yield the sizes from `high` down to `low`."""
        for size in range(high, low - 1, -1):
            if not self._divisors or start % size == 0:
                yield size

    def _first(self, start: int) -> int:
        with self._lock:
            fits, failed = self.fits, self.smallest_failed
        if failed is None or start < failed:
            return start
        if fits is None:
            return self._smaller(start, failed) or self._minimum
        fits = next(self._sizes(start, 1, fits), fits)
        if self._search and failed - fits > max(1, fits // 16):
            between = list(self._sizes(start, fits + 1, failed - 1))
            if between:
                return between[len(between) // 2]
        return fits

    def _smaller(self, start: int, failed: int) -> int | None:
        """Return the next size to try after one that failed, or None."""
        with self._lock:
            fits = self.fits
        size = max(failed // 2, self._minimum, fits if fits is not None and fits < failed else 0)
        return next(self._sizes(start, self._minimum, size), None) if size < failed else None

    def _note(self, size: int, fitted: bool) -> None:
        with self._lock:
            if fitted:
                if self.smallest_failed is not None and size >= self.smallest_failed:
                    self.smallest_failed = None  # another time there was more room
                self.fits = max(size, self.fits or 0)
            else:
                self.smallest_failed = min(size, self.smallest_failed or size)
                if self.fits is not None and self.fits >= size:
                    self.fits = None


class _Attempts:
    """One call of a decorated function: its arguments, and what it was tried with."""

    def __init__(
        self,
        retry: Retry,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        _refuse_ranks("retry_on_oom()")
        self._retry = retry
        self._bound = signature.bind_partial(*args, **kwargs)
        self._parameters = signature.parameters
        self._start: int | None = self._bound.arguments.get("batch_size", retry._start)
        if retry._start is None:
            self._start = None
        self._size = None if self._start is None else retry._first(self._start)
        self._tried: list[int] = []
        self._left = retry._attempts

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what to call the function with now."""
        if self._start is not None and self._size is not None:
            self._bound.arguments["batch_size"] = self._size
            if "accumulation_steps" in self._parameters:
                self._bound.arguments["accumulation_steps"] = self._start // self._size
        return self._bound.args, self._bound.kwargs

    def succeeded(self) -> None:
        if self._size is not None:
            self._retry._note(self._size, fitted=True)

    def can_go_on_after(self, error: BaseException) -> bool:
        """Free what the failed attempt held and choose the next one; False when there is none."""
        if not _frames.caused_by_out_of_memory(error):
            return False
        _refuse_ranks("retry_on_oom()")
        retry = self._retry
        what = retry.name + " ran out of memory"
        if self._start is not None and self._size is not None:
            failed = self._size
            self._tried.append(failed)
            retry._note(failed, fitted=False)
            self._size = retry._smaller(self._start, failed)
            if self._size is None:
                sizes = ", ".join(map(str, self._tried))
                _add_note(error, f"{retry.name} ran out of memory with every batch size: {sizes}")
                return False
            what += f" with batch size {failed}, and is called again with {self._size}"
        elif self._left == 0:
            return False
        else:
            self._left -= 1
            what += ", and is called again"
        retry.recovered = recover(error)
        _log.warning("%s: %s", what, retry.recovered)
        return True

    def before_retry(self) -> None:
        if self._retry._on_retry is not None:
            self._retry._on_retry(self._retry)


def _decorate(function: F, retry: Retry) -> F:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"retry_on_oom() cannot call the generator {retry.name} again: it has given away part "
            "of its values by then"
        )
    signature = inspect.signature(function)
    if retry._start is not None and "batch_size" not in signature.parameters:
        raise TypeError(f"retry_on_oom(batch_size=...): {retry.name}() has no such parameter")
    retry._divisors = "accumulation_steps" in signature.parameters

    # The next attempt begins outside of the except block: there the error is gone, and what is
    # raised then has no context.
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def retried_coroutine(*args: Any, **kwargs: Any) -> Any:
            attempts = _Attempts(retry, signature, args, kwargs)
            while True:
                args, kwargs = attempts.arguments()
                try:
                    result = await function(*args, **kwargs)
                except BaseException as error:
                    if not attempts.can_go_on_after(error):
                        raise
                else:
                    attempts.succeeded()
                    return result
                attempts.before_retry()

        retried: Any = retried_coroutine
    else:

        @functools.wraps(function)
        def retried_call(*args: Any, **kwargs: Any) -> Any:
            attempts = _Attempts(retry, signature, args, kwargs)
            while True:
                args, kwargs = attempts.arguments()
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:
                    if not attempts.can_go_on_after(error):
                        raise
                else:
                    attempts.succeeded()
                    return result
                attempts.before_retry()

        retried = retried_call
    retried.retry = retry
    return cast(F, retried)


# --- helpers


def _refuse_ranks(what: str) -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    # Not the words of an OOM: whoever looks for them must not take this for one.
    raise RecoveryError(
        f"gpumemx.{what} works in programs of one process: here torch.distributed is initialized, "
        f"with {distributed.get_world_size()} rank(s), and all of them would have to agree to go "
        "on with a smaller batch, or they wait for each other for ever"
    )


def _add_note(error: BaseException, note: str) -> None:
    if add_note := getattr(error, "add_note", None):  # from Python 3.11 on
        add_note(note)


def _cuda() -> ModuleType | None:
    """Return torch.cuda where it has been imported."""
    return sys.modules.get("torch.cuda")


def _live_bytes() -> int:
    """Return the bytes in tensors on all devices."""
    adapter, _ = _adapter.current()
    live = 0
    if adapter is not None and adapter.cuda_started():
        for index in range(_MOST_DEVICES):
            try:
                live += adapter.memory_info(index)["live"]
            except IndexError:
                break
    elif (cuda := _cuda()) is not None and adapter is None and cuda.is_initialized():
        live = sum(cuda.memory_allocated(i) for i in range(cuda.device_count()))
    return live


def _give_back(only: int | None) -> int:
    """Give unused memory back to the devices; return its bytes. Raises nothing."""
    cuda = _cuda()
    released = 0
    try:
        if cuda is None or (cuda.is_initialized() and cuda.is_current_stream_capturing()):
            return 0
        adapter, _ = _adapter.current()
        if adapter is not None and adapter.cuda_started():
            for index in range(_MOST_DEVICES) if only is None else (only,):
                try:
                    released += adapter.clear_cache(index, True).to_dict()["released"]
                except IndexError:
                    break
        elif adapter is None and cuda.is_initialized():
            devices = range(cuda.device_count())
            before = sum(map(cuda.memory_reserved, devices))
            cuda.empty_cache()
            released = before - sum(map(cuda.memory_reserved, devices))
    except RuntimeError as error:  # it must not stand in for the error that is recovered from
        _log.warning("unused memory could not be given back: %s", error)
    return released


def _size(size: int) -> str:
    from gpumemx import _core

    return _core.format_bytes(size)
