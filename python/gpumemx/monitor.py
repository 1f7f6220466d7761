# SPDX-License-Identifier: BSD-3-Clause
"""What a block of code does to a device's memory."""

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast, overload

from gpumemx import _adapter
from gpumemx._device import Device, device_index, no_device

F = TypeVar("F", bound=Callable[..., Any])

_ZEROS: _adapter.ScopeFigures = {
    "before": 0,
    "after": 0,
    "peak": 0,
    "allocations": 0,
    "driver_calls": 0,
    "driver_seconds": 0.0,
}


class GPUMonitor:
    """Figures of one block of code; made by `monitor`.

    While the block runs the figures are those so far, afterwards those of the whole. Used several
    times, as the monitor of a function is, it shows the last run. Sizes are bytes of live tensors,
    each rounded up to 512, of all threads on the device.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        device: Device = None,
        on_exit: "Callable[[GPUMonitor], object] | None" = None,
    ) -> None:
        self.name = name or "block"
        self.device: int | None = None
        """Index of the device that is measured; None before the first run."""
        self._asked_device = device
        self._on_exit = on_exit
        self._runs: list[_Run] = []  # open, innermost last
        self._last = _Run(0)

    # --- a block

    def __enter__(self) -> "GPUMonitor":
        index = device_index(self._asked_device)
        run = _Run(index)
        run.begin()
        self.device = index
        self._runs.append(run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._last = self._runs.pop()
        self._last.end()
        if self._on_exit is not None:
            self._on_exit(self)

    # --- a function

    def __call__(self, function: F) -> F:
        """Measure each call of a function, also of a coroutine function.

        Raises
        ------
        TypeError
            It is a generator function: its body runs when somebody iterates, not when it is called.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("gpumemx.monitor measures no generator; use 'with' in its body")
        name = self.name if self.name != "block" else function.__qualname__
        self.name = name

        def again() -> GPUMonitor:
            # One a call: calls may nest and run in several threads at once.
            return GPUMonitor(name, device=self._asked_device, on_exit=self._finish)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def measured_coroutine(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return await function(*args, **kwargs)

            measured: Any = measured_coroutine
        else:

            @functools.wraps(function)
            def measured_call(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return function(*args, **kwargs)

            measured = measured_call
        measured.monitor = self
        return cast(F, measured)

    def _finish(self, run: "GPUMonitor") -> None:
        self._last, self.device = run._last, run.device
        if self._on_exit is not None:
            self._on_exit(run)

    # --- the figures

    @property
    def before(self) -> int:
        """Allocated when it began."""
        return self._figures()["before"]

    @property
    def after(self) -> int:
        """Allocated when it ended; until then, now."""
        return self._figures()["after"]

    @property
    def allocated(self) -> int:
        """The same as `after`: what is allocated now, while the block runs."""
        return self.after

    @property
    def delta(self) -> int:
        """``after - before``: what the block kept, or, below 0, freed of what was there."""
        figures = self._figures()
        return figures["after"] - figures["before"]

    @property
    def peak(self) -> int:
        """The most that was allocated inside. Other scopes' and torch's peaks are left alone.

        Exact while one thread at a time allocates on the device; else at most the sum of what
        each stream had at its highest.
        """
        return self._figures()["peak"]

    @property
    def allocations(self) -> int:
        """How many blocks were allocated inside."""
        return self._figures()["allocations"]

    @property
    def driver_calls(self) -> int:
        """Calls to the driver that move memory: create, map, unmap, release, allocate, free."""
        return self._figures()["driver_calls"]

    @property
    def driver_time(self) -> float:
        """Seconds in the driver, of all threads; 0.0 with torch's own allocator."""
        return self._figures()["driver_seconds"]

    @property
    def exact(self) -> bool:
        """Whether gpumemx itself was measured; else `report` says what is missing."""
        return self._run().exact

    def report(self) -> str:
        """Say the figures in a line, and in a second one what they leave out, if anything."""
        return self._run().report(self.name)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"<gpumemx.GPUMonitor {self.report().splitlines()[0]}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for programs: bytes as int, seconds as float."""
        figures = self._figures()
        return {
            "name": self.name,
            "device": self.device,
            "before": figures["before"],
            "after": figures["after"],
            "delta": figures["after"] - figures["before"],
            "peak": figures["peak"],
            "allocations": figures["allocations"],
            "driver_calls": figures["driver_calls"],
            "driver_time": figures["driver_seconds"],
            "exact": self.exact,
        }

    def _run(self) -> "_Run":
        return self._runs[-1] if self._runs else self._last

    def _figures(self) -> _adapter.ScopeFigures:
        return self._run().figures()


class _Run:
    """One run of a block: a scope of the adapter, as soon as the program has torch."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._scope: _adapter.Scope | None = None
        self._is_open = False
        self._why = "it has not run yet"

    def begin(self) -> None:
        self._is_open = True
        adapter, self._why = _adapter.current()
        if adapter is not None:
            self._scope = adapter.Scope(self.device)

    def _find(self) -> _adapter.Scope | None:
        if self._scope is None and self._is_open:
            # torch may have been imported inside the block: then all that is there is from inside.
            adapter, self._why = _adapter.current()
            if adapter is not None:
                self._scope = adapter.Scope(self.device, from_start=True)
        return self._scope

    def end(self) -> None:
        if scope := self._find():
            scope.end()
        self._is_open = False

    def figures(self) -> _adapter.ScopeFigures:
        scope = self._find()
        return _ZEROS if scope is None else scope.read()

    @property
    def exact(self) -> bool:
        scope = self._find()
        return scope is not None and scope.exact

    def report(self, name: str) -> str:
        scope = self._find()
        if scope is None:
            return f"{name}: nothing to measure: {self._why}"
        adapter, _ = _adapter.current()
        if adapter is not None and not adapter.cuda_started():
            state = "there is no CUDA device" if no_device() else "CUDA has not started"
            return f"{name}: nothing to measure: {state}"
        return scope.report(name)


@overload
def monitor(name: F) -> F: ...
@overload
def monitor(
    name: str | None = None,
    *,
    device: Device = None,
    on_exit: Callable[[GPUMonitor], object] | None = None,
) -> GPUMonitor: ...
def monitor(
    name: F | str | None = None,
    *,
    device: Device = None,
    on_exit: Callable[[GPUMonitor], object] | None = None,
) -> F | GPUMonitor:
    """Measure the device memory that a block of code or a function uses.

    Parameters
    ----------
    name
        Shown in reports. Default: ``block``, or the function's name.
    device
        Index, name or ``torch.device``. Default: the current device, read on entry; 0 before CUDA
        has started.
    on_exit
        Called with the finished monitor, also when the block raises. Nothing is printed otherwise.

    Returns
    -------
    GPUMonitor
        For ``with``, or to decorate a function, which then has it as its attribute ``monitor``.
        ``@gpumemx.monitor`` alone decorates too.

    Raises
    ------
    IndexError
        On entry: CUDA has started and has no such device.
    ValueError, TypeError
        On entry: `device` is no CUDA device.

    Notes
    -----
    Costs two counter reads at each end, no driver call and no wait for the device. Monitors nest
    and may overlap, also across threads, and count the allocations of every thread. Memory freed
    while another stream still uses it is not counted as allocated. Without gpumemx it reads torch's
    own allocator and says in its report what that leaves out; without a GPU, without PyTorch or
    before CUDA starts all figures are 0. Starts no CUDA.

    Examples
    --------
    >>> import gpumemx
    >>> with gpumemx.monitor("forward") as m:
    ...     pass  # y = model(x)
    >>> m.peak >= m.before
    True

    On a GPU ``print(m.report())`` prints a line such as
    ``forward: peak 3.20 GiB, kept +1.10 GiB, 12 driver calls in 0.4 ms``.
    """
    if callable(name):
        return GPUMonitor()(name)
    return GPUMonitor(name, device=device, on_exit=on_exit)
