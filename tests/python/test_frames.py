# SPDX-License-Identifier: BSD-3-Clause
"""Which frames are cleared, without torch: how frames live and die differs between Pythons.

test_recovery.py has the same with tensors, and what the public functions do with it.
"""

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpumemx import _frames


class Big:
    """Stands in for a tensor; seen by weak reference."""

    def __init__(self) -> None:
        made.append(weakref.ref(self))


made: "list[weakref.ref[Big]]" = []
kept: list[Any] = []


def alive() -> int:
    return sum(ref() is not None for ref in made)


def run_out() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def step() -> None:
    own = Big()
    run_out()
    kept.append(own)  # not reached


def context() -> None:
    def other() -> None:
        part = Big()
        raise KeyError(str(part))

    try:
        other()
    except KeyError:
        step()


def cause() -> None:
    try:
        step()
    except RuntimeError as error:
        here = Big()
        raise ValueError(str(here)) from error


def stored() -> None:
    def attempt() -> None:
        here = Big()
        try:
            step()
        except RuntimeError as error:
            kept.append(error)
        del here

    def caller() -> None:
        above = Big()  # held by the frame that it called
        attempt()
        _ = above

    caller()
    run_out()


def in_a_generator() -> None:
    def inner() -> Iterator[Big]:
        own = Big()
        yield own
        yield own

    def outer() -> Iterator[None]:
        own = Big()
        suspended = inner()
        for _ in suspended:
            step()
            yield
        del own

    for _ in outer():
        pass


def in_a_task() -> None:
    async def work() -> None:
        own = Big()
        await asyncio.sleep(0)
        step()
        del own

    async def main() -> None:
        task = asyncio.ensure_future(work())
        kept.append(task)
        await task

    asyncio.run(main())


def in_a_thread() -> None:
    def work() -> None:
        own = Big()
        try:
            step()
        except RuntimeError as error:
            kept.append(error)
        del own

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise kept[-1]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    made.clear()
    kept.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    made.clear()
    kept.clear()


@pytest.mark.parametrize(
    "fails", [step, context, cause, stored, in_a_generator, in_a_task, in_a_thread]
)
def test_dead_calls_let_go(fails: Callable[[], None]) -> None:
    try:
        fails()
    except (RuntimeError, ValueError) as error:
        before = alive()
        cleared = _frames.clear(error)
        gc.collect()
        after = alive()
    assert before >= 1
    assert after == 0
    assert "step" in {frame.function.split(".")[-1] for frame in cleared}


def test_running_calls_and_their_callers_keep_what_they_have() -> None:
    def outer() -> tuple[Big, Big]:
        mine = Big()

        def inner() -> Big:
            own = Big()
            try:
                step()
            except RuntimeError:
                _frames.clear(None)
            return own

        return mine, inner()

    assert all(outer())
    assert len(made) == 3


def test_the_error_that_is_being_handled_counts_whatever_it_is() -> None:
    def interrupted() -> None:
        own = Big()
        raise KeyboardInterrupt(str(own))

    try:
        interrupted()
    except KeyboardInterrupt:
        _frames.clear(None)
        after = alive()
    assert after == 0


def survives() -> Iterator[Any]:
    own = Big()
    try:
        step()
    except RuntimeError as error:
        yield error
    yield own


def test_what_can_be_resumed_is_not_closed() -> None:
    generator = survives()
    kept.append(next(generator))
    assert alive() == 2
    _frames.clear(kept[0])
    assert alive() == 1
    assert isinstance(next(generator), Big)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python itself refuses to close it")
def test_nor_is_it_when_the_collector_does_not_know_it() -> None:
    generator = survives()
    kept.append(next(generator))
    gc.freeze()
    try:
        _frames.clear(kept[0])
    finally:
        gc.unfreeze()
    assert isinstance(next(generator), Big)


def test_a_coroutine_that_waits_is_not_closed() -> None:
    async def work() -> Big:
        own = Big()
        try:
            step()
        except RuntimeError as error:
            kept.append(error)
        await asyncio.sleep(0.01)
        return own

    async def main() -> Big:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        _frames.clear(kept[0])
        return await task

    assert isinstance(asyncio.run(main()), Big)


def test_copies_that_a_debugger_made_go_too() -> None:
    try:
        step()
    except RuntimeError as error:
        tb = error.__traceback__
        while tb is not None:
            assert tb.tb_frame.f_locals is not None
            tb = tb.tb_next
        _frames.clear(error)
        after = alive()
    assert after == 0


def test_the_namespace_of_a_module_or_class_stays() -> None:
    space: dict[str, Any] = {"Big": Big, "run_out": run_out}
    try:
        exec("x = Big()\nrun_out()", space)
    except RuntimeError as error:
        _frames.clear(error)
    assert isinstance(space["x"], Big)


def test_chains_with_a_cycle_end() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert len(list(_frames.chain(first))) == 2
    assert not _frames.caused_by_out_of_memory(first)
