# SPDX-License-Identifier: BSD-3-Clause
"""What exceptions keep alive: the local variables of the calls that they ended.

An exception has a traceback, the traceback has the frames of the calls that it went through, and
a frame has its local variables. So the tensors of a failed step live as long as anybody has the
error: an ``except`` block, a list, ``sys.last_exc``, another error's ``__context__``. Dropping
references to the error does not help where others have it too; clearing the frames does, and leaves
the error as readable as before.

`clear` touches no call that still goes on: neither running ones, of any thread, nor suspended
generators and coroutines, which somebody may resume. Imports no torch.
"""

import dis
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# RuntimeErrors that say so in words only. cuBLAS and cuDNN have no memory left for a workspace.
_OOM_WORDS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)
_RESUMABLE = 0x20 | 0x80 | 0x200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
_OPTIMIZED = 0x1  # CO_OPTIMIZED: the locals are not a namespace that others use too
_DEEPEST = 4  # containers in containers in which tensors are looked for


@dataclass(frozen=True)
class ClearedFrame:
    """A call that is over and whose local variables were dropped."""

    function: str
    file: str
    line: int
    """Where it stopped."""
    tensor_bytes: int
    """Of tensors among its variables, on any device; a tensor in several frames counts in one."""
    via: str
    """What kept it: ``the error``, ``sys.last_exc``, ``a stored OutOfMemoryError``."""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


# --- which errors


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether this very error is one of device memory, or of CPU memory by torch."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if kind is not None and isinstance(error, kind):
        return True
    if not isinstance(error, RuntimeError):
        return False
    texts = [text for text in error.args if isinstance(text, str)]
    return any(word in text for word in _OOM_WORDS for text in texts)


def caused_by_out_of_memory(error: BaseException, depth: int = 0) -> bool:
    """Say whether it is one, was raised ``from`` one, or is a group of nothing else.

    An error that merely came up while another was handled is an error of its own.
    """
    if is_out_of_memory(error):
        return True
    if depth > 100:  # somebody tied a cycle
        return False
    parts = _parts(error)
    if parts:
        return all(caused_by_out_of_memory(part, depth + 1) for part in parts)
    cause = error.__cause__
    return cause is not None and caused_by_out_of_memory(cause, depth + 1)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield it and all that hang on it: causes, contexts, members of groups; each once."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        e = todo.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        yield e
        todo += [e.__cause__, e.__context__, *_parts(e)]


def _parts(error: BaseException) -> tuple[BaseException, ...]:
    parts = getattr(error, "exceptions", ())  # of an ExceptionGroup, from Python 3.11 on
    if not isinstance(parts, (tuple, list)):
        return ()
    return tuple(part for part in parts if isinstance(part, BaseException))


# --- which frames


def clear(error: BaseException | None) -> list[ClearedFrame]:
    """Drop the local variables of the dead frames that errors hold.

    Of `error`, of the error that is being handled, of the last one of an interactive session, and
    of every error in the process that has an out-of-memory error in its chain.
    """
    seen: set[int] = set()
    frames: list[tuple[types.FrameType, str]] = []
    for root, via in _roots(error):
        for frame in _frames(root):
            if id(frame) not in seen:
                seen.add(id(frame))
                frames.append((frame, via))
    running = _running()
    frames = [(frame, via) for frame, via in frames if frame not in running]
    suspended = _suspended(frame for frame, _ in frames)
    cleared: list[ClearedFrame] = []
    counted: set[int] = set()
    for frame, via in frames:
        if frame in suspended:
            continue
        size = sum(_tensor_bytes(_variables(frame), counted))
        try:
            frame.clear()
        except RuntimeError:  # it runs where nobody can see it, in a greenlet
            continue
        if frame.f_code.co_flags & _OPTIMIZED and sys.version_info < (3, 13):
            # A debugger or an error page that looked at the variables has left a copy of them in
            # the frame, which clear() forgets (gh-113939). Looking again empties it.
            _ = frame.f_locals
        cleared.append(
            ClearedFrame(
                getattr(frame.f_code, "co_qualname", frame.f_code.co_name),
                frame.f_code.co_filename,
                frame.f_lineno or frame.f_code.co_firstlineno,
                size,
                via,
            )
        )
    return cleared


_Root = BaseException | types.TracebackType


def _roots(error: BaseException | None) -> Iterator[tuple[_Root, str]]:
    if error is not None:
        yield error, "the error"
    if (handled := sys.exc_info()[1]) is not None:
        yield handled, "the error"
    for name in ("last_exc", "last_value", "last_traceback"):
        root = getattr(sys, name, None)
        if isinstance(root, (BaseException, types.TracebackType)):
            yield root, f"sys.{name}"
    for thing in gc.get_objects():
        # type(): isinstance() asks proxies what they pretend to be, and runs their code.
        if issubclass(type(thing), BaseException) and any(map(is_out_of_memory, chain(thing))):
            yield thing, f"a stored {type(thing).__name__}"


def _frames(root: _Root) -> Iterator[types.FrameType]:
    if isinstance(root, types.TracebackType):
        tracebacks: list[types.TracebackType | None] = [root]
    else:
        tracebacks = [e.__traceback__ for e in chain(root)]
    for tb in tracebacks:
        if tb is None:
            continue
        # A traceback begins where the error was caught; that frame holds those of its callers, and
        # they their variables, also when they have returned since.
        caller = tb.tb_frame.f_back
        while tb is not None:
            yield tb.tb_frame
            tb = tb.tb_next
        while caller is not None:
            yield caller
            caller = caller.f_back


def _running() -> set[types.FrameType]:
    running: set[types.FrameType] = set()
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            running.add(frame)
            frame = frame.f_back
    return running


def _suspended(frames: Iterable[types.FrameType]) -> set[types.FrameType]:
    """Return those that a generator or coroutine would go on in. Clearing them would close it."""
    frames = [frame for frame in frames if frame.f_code.co_flags & _RESUMABLE]
    if not frames:
        return set()
    asked = {frame.f_code for frame in frames}
    found: set[types.FrameType] = set()
    if gc.get_freeze_count() and sys.version_info < (3, 13):
        # What is frozen cannot be found below. It stands at a yield or an await, as a call that
        # failed only does if the error was thrown into it. From 3.13 on clear() refuses.
        found.update(frame for frame in frames if _opcode(frame) in _AT_A_YIELD)
    names = {
        types.GeneratorType: ("gi_code", "gi_frame"),
        types.CoroutineType: ("cr_code", "cr_frame"),
        types.AsyncGeneratorType: ("ag_code", "ag_frame"),
    }
    for thing in gc.get_objects():
        if (of := names.get(type(thing))) and getattr(thing, of[0]) in asked:
            frame = getattr(thing, of[1])  # None when it has ended
            if frame is not None:
                found.add(frame)
    return found


_AT_A_YIELD = ("YIELD_VALUE", "YIELD_FROM", "SEND", "RESUME")


def _opcode(frame: types.FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""


# --- what they hold


def _variables(frame: types.FrameType) -> list[Any]:
    # As the garbage collector sees them: unlike f_locals it leaves no copy behind.
    skip = {id(frame.f_globals), id(frame.f_builtins), id(frame.f_code)}
    return [
        thing
        for thing in gc.get_referents(frame)
        if id(thing) not in skip and type(thing) is not types.FrameType
    ]


def _tensor_bytes(things: list[Any], counted: set[int], depth: int = 0) -> Iterator[int]:
    """Yield the sizes of the storages of tensors, in containers too; each storage once."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None:
        return
    for thing in things:
        kind = type(thing)
        if issubclass(kind, tensor):
            try:
                storage = thing.untyped_storage()
                key, size = storage._cdata, int(storage.nbytes())
            except Exception:  # sparse, fake, lazy: no storage, or none that may be asked
                continue
            if key not in counted:
                counted.add(key)
                yield size
        elif depth < _DEEPEST and kind in (list, tuple, set, types.CellType):
            inside = gc.get_referents(thing) if kind is types.CellType else list(thing)
            yield from _tensor_bytes(inside, counted, depth + 1)
        elif depth < _DEEPEST and kind is dict:
            yield from _tensor_bytes(list(thing.values()), counted, depth + 1)
