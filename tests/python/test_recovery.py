# SPDX-License-Identifier: BSD-3-Clause
"""recover, oom_guard and retry_on_oom: what they free and leave alone, which sizes they try."""

import asyncio
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import gpumemx
import pytest
from torch_tools import program

torch = pytest.importorskip("torch")

import oom_variants as variants  # noqa: E402
from oom_variants import MIB, TEXT, alive, big, kept, run_out  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    variants.forget_all()
    gc.collect()
    gc.disable()  # so that no collection comes at the right moment by chance
    yield
    gc.enable()
    variants.forget_all()


@pytest.fixture(params=list(variants.VARIANTS))
def step(request: pytest.FixtureRequest) -> variants.Step:
    return variants.VARIANTS[request.param]


errors = (torch.OutOfMemoryError, variants.StepError)


# --- all the ways in which tensors are kept


def test_all_is_free_before_the_next_attempt(step: variants.Step) -> None:
    tries: list[int] = []

    @gpumemx.retry_on_oom(batch_size=8)
    def train(batch_size: int) -> str:
        tries.append(alive())
        assert isinstance(step(batch_size > 2), str)
        return f"{batch_size} fits"

    assert train() == "2 fits"
    assert tries == [0, 0, 0]
    assert train() == "2 fits"
    assert len(tries) == 4


def test_all_is_free_inside_the_except_block(step: variants.Step) -> None:
    try:
        step(True)
    except errors as error:
        assert step is variants.in_a_worker_of_a_loader or alive() > 0
        done = gpumemx.recover(error)
        assert alive() == 0
        step(False)
    assert done.frames


def test_all_is_free_without_the_error_at_hand(step: variants.Step) -> None:
    try:
        step(True)
    except errors:
        gpumemx.recover()
        assert alive() == 0
        step(False)


def test_all_is_free_after_the_except_block(step: variants.Step) -> None:
    again = False
    try:
        step(True)
    except errors as error:
        kept.append(error)
        again = True
    assert again
    gpumemx.recover()
    assert alive() == 0
    step(False)


def test_all_is_free_behind_a_guard(step: variants.Step) -> None:
    with gpumemx.oom_guard() as guard:
        step(True)
    assert guard.failed
    assert alive() == 0
    assert isinstance(guard.error, errors)
    assert "OutOfMemoryError" in guard.traceback
    with gpumemx.oom_guard() as guard:
        step(False)
    assert (guard.failed, guard.error, guard.traceback) == (False, None, "")


def test_all_is_free_in_a_thread_of_its_own(step: variants.Step) -> None:
    @gpumemx.retry_on_oom(batch_size=2)
    def train(batch_size: int) -> str:
        assert alive() == 0
        return str(step(batch_size > 1))

    assert isinstance(variants.in_new_thread(train), str)


def test_all_is_free_in_a_coroutine(step: variants.Step) -> None:
    if step is variants.in_an_async_task:
        pytest.skip("asyncio.run() has no place in a coroutine")

    @gpumemx.retry_on_oom(batch_size=2)
    async def train(batch_size: int) -> str:
        await asyncio.sleep(0)
        assert alive() == 0
        return str(step(batch_size > 1))

    assert isinstance(asyncio.run(train()), str)


# --- what it says


def test_it_says_who_held_how_much() -> None:
    try:
        variants.nested(True)
    except torch.OutOfMemoryError as error:
        done = gpumemx.recover(error)
    held = {frame.function.split(".")[-1]: frame for frame in done.frames}
    assert {name: held[name].tensor_bytes for name in ("nested", "inner", "step", "run_out")} == {
        "nested": 2 * MIB,
        "inner": MIB,
        "step": MIB,
        "run_out": 0,
    }
    assert done.tensor_bytes == 4 * MIB
    assert held["step"].file == variants.__file__
    assert held["step"].line == variants.step.__code__.co_firstlineno + 3
    assert {frame.via for frame in done.frames} == {"the error"}
    assert str(done) == (
        f"4.00 MiB of tensors held by the error: 2.00 MiB in {held['nested']}, "
        f"1.00 MiB in {held['inner']}, 1.00 MiB in {held['step']}; "
        "0 B of device memory freed, 0 B given back"
    )
    assert done.to_dict()["frames"][0]["via"] == "the error"


def test_it_says_through_what_they_were_held() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        variants.of_an_interactive_session(True)
    (one,) = {frame.via for frame in gpumemx.recover().frames}
    assert one == ("sys.last_exc" if sys.version_info >= (3, 12) else "sys.last_value")
    variants.forget_all()
    try:
        variants.step(True)
    except torch.OutOfMemoryError as error:
        kept.append({"deep": [error]})
    assert {f.via for f in gpumemx.recover().frames} == {"a stored OutOfMemoryError"}


def test_a_tensor_that_several_frames_have_counts_once() -> None:
    def inner(x: Any) -> None:
        view = x[1:]
        run_out()
        _ = view

    def outer() -> None:
        inner(big())

    try:
        outer()
    except torch.OutOfMemoryError:
        assert gpumemx.recover().tensor_bytes == MIB


def test_with_nothing_to_do_it_says_so() -> None:
    done = gpumemx.recover()
    assert (done.frames, done.freed, done.released) == ((), 0, 0)
    assert str(done) == "errors held no tensors; 0 B of device memory freed, 0 B given back"


def test_the_error_stays_as_it_was() -> None:
    try:
        variants.nested(True)
    except torch.OutOfMemoryError as error:
        import traceback

        before = traceback.format_exception(error)
        gpumemx.recover(error)
        after = traceback.format_exception(error)
    assert after == before


# --- what it leaves alone


def test_running_calls_keep_their_variables() -> None:
    mine = big()

    def work() -> int:
        own = big()
        try:
            variants.step(True)
        except torch.OutOfMemoryError:
            gpumemx.recover()
        return own.numel() + mine.numel()

    assert work() == 2 * MIB


def test_calls_of_other_threads_keep_their_variables() -> None:
    caught, cleared = threading.Event(), threading.Event()

    def work() -> int:
        own = big()
        try:
            variants.step(True)
        except torch.OutOfMemoryError as error:
            kept.append(error)
            caught.set()
            cleared.wait(60)
        return own.numel()

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    assert caught.wait(60)
    assert alive() == 2
    gpumemx.recover()
    assert alive() == 1
    cleared.set()
    thread.join()
    assert results == [MIB]


def test_a_generator_that_can_be_resumed_goes_on() -> None:
    def survives() -> Iterator[Any]:
        own = big()
        try:
            variants.step(True)
        except torch.OutOfMemoryError as error:
            yield error
        yield own.numel()

    generator = survives()
    kept.append(next(generator))
    gpumemx.recover()
    assert alive() == 1
    assert next(generator) == MIB


def test_a_coroutine_that_can_be_resumed_goes_on() -> None:
    async def survives() -> int:
        own = big()
        try:
            variants.step(True)
        except torch.OutOfMemoryError as error:
            kept.append(error)
        await asyncio.sleep(0.01)
        return own.numel()

    async def main() -> int:
        task = asyncio.create_task(survives())
        await asyncio.sleep(0)
        gpumemx.recover()
        return await task

    assert asyncio.run(main()) == MIB


def test_module_variables_and_other_errors_are_left_alone() -> None:
    space: dict[str, Any] = {"run_out": run_out, "big": big}
    try:
        exec("x = big()\nrun_out()", space)
    except torch.OutOfMemoryError as error:
        gpumemx.recover(error)
    assert space["x"].numel() == MIB

    def other() -> None:
        part = big()
        raise ValueError(part.numel())

    try:
        other()
    except ValueError as error:
        kept.append(error)
    gpumemx.recover()
    assert alive() == 2


def test_variables_that_a_debugger_has_looked_at_are_freed() -> None:
    try:
        variants.step(True)
    except torch.OutOfMemoryError as error:
        tb = error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code is variants.step.__code__:
                assert "activations" in tb.tb_frame.f_locals
            tb = tb.tb_next
        assert alive() == 1
        gpumemx.recover()
        assert alive() == 0


def test_a_proxy_that_fails_when_asked_does_no_harm() -> None:
    class Proxy:
        @property
        def __class__(self) -> type:
            raise AssertionError("somebody asked")

    def fails() -> None:
        strange = Proxy()
        run_out()
        _ = strange

    try:
        fails()
    except torch.OutOfMemoryError:
        assert [f.tensor_bytes for f in gpumemx.recover().frames if f.line] == [0, 0]


# --- the guard


def a_mistake_of_a_handler() -> None:
    try:
        run_out()
    except torch.OutOfMemoryError:
        raise KeyError  # noqa: B904


def test_other_errors_pass_a_guard() -> None:
    with pytest.raises(KeyError), gpumemx.oom_guard() as guard:
        raise KeyError
    assert not guard.failed
    with pytest.raises(RuntimeError, match="expected"), gpumemx.oom_guard():
        raise RuntimeError("expected scalar type Float")
    with pytest.raises(KeyError), gpumemx.oom_guard():
        a_mistake_of_a_handler()


def test_a_guard_can_raise_the_error_when_all_is_free() -> None:
    guard = gpumemx.oom_guard(suppress=False)
    with pytest.raises(torch.OutOfMemoryError) as caught, guard:
        variants.step(True)
    assert guard.failed
    assert alive() == 0
    assert "raise torch.OutOfMemoryError(TEXT)" in guard.traceback
    assert caught.traceback[-1].name == "run_out"


def test_a_guard_does_not_keep_the_function_that_it_stands_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work() -> "weakref.ref[Any]":
        own = torch.ones(3)
        with gpumemx.oom_guard() as guard:
            variants.step(True)
        assert guard.failed
        return weakref.ref(own)

    with caplog.at_level(logging.WARNING, "gpumemx"):
        assert work()() is None  # at once: gc is off
    assert "left a block that ran out of memory (1.00 MiB of tensors held by" in caplog.text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of errors")
def test_a_group_of_nothing_else_counts() -> None:
    group = getattr(__import__("builtins"), "ExceptionGroup")  # noqa: B009  # mypy at 3.10
    with gpumemx.oom_guard() as guard:
        raise group("tasks", [torch.OutOfMemoryError(TEXT), torch.OutOfMemoryError(TEXT)])
    assert guard.failed
    with pytest.raises(group), gpumemx.oom_guard():
        raise group("tasks", [torch.OutOfMemoryError(TEXT), KeyError("a")])


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be ...",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_other_words_for_it_count(text: str) -> None:
    with gpumemx.oom_guard() as guard:
        raise RuntimeError(text)
    assert guard.failed


# --- the sizes


def sizes_of(limit: Callable[[], int], calls: int = 1, **options: Any) -> tuple[list[int], Any]:
    """Return the sizes that are tried in some calls when `limit` is the largest that fits."""
    tried: list[int] = []

    @gpumemx.retry_on_oom(**options)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > limit():
            run_out()
        return batch_size

    for _ in range(calls):
        assert train() <= limit()
    return tried, train.retry  # type: ignore[attr-defined]


def test_it_halves_and_remembers() -> None:
    tried, retry = sizes_of(lambda: 20, calls=3, batch_size=100)
    assert tried == [100, 50, 25, 12, 12, 12]
    assert (retry.batch_size, retry.fits, retry.smallest_failed) == (12, 12, 25)
    assert "batch_size 12, fits 12, smallest_failed 25" in repr(retry)
    retry.forget()
    assert retry.batch_size == 100


def test_it_searches() -> None:
    tried, retry = sizes_of(lambda: 90, calls=8, batch_size=256, search=True)
    assert tried == [256, 128, 64, 96, 64, 80, 88, 92, 88, 88, 88, 88]
    assert retry.fits == 88
    assert retry.smallest_failed == 92


def test_what_fitted_once_need_not_always_fit() -> None:
    limits = [16] * 2 + [5] * 8  # asked for twice in a call that fits
    tried, retry = sizes_of(lambda: limits.pop(0), calls=2, batch_size=16)
    assert tried == [16, 16, 8, 4]
    assert (retry.fits, retry.smallest_failed) == (4, 8)


def test_the_minimum_is_tried_and_no_less() -> None:
    tried, _ = sizes_of(lambda: 10, batch_size=100, minimum=10)
    assert tried == [100, 50, 25, 12, 10]
    seen: list[int] = []

    @gpumemx.retry_on_oom(batch_size=8, minimum=3)
    def never(batch_size: int) -> None:
        seen.append(batch_size)
        run_out()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        never()
    assert seen == [8, 4, 3]
    assert str(caught.value) == TEXT
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [
            f"{never.__qualname__} ran out of memory with every batch size: 8, 4, 3"
        ]
    assert caught.value.__context__ is None
    with pytest.raises(torch.OutOfMemoryError):
        never()
    assert seen == [8, 4, 3, 3]


def test_a_size_that_the_caller_gives_is_where_it_begins() -> None:
    seen: list[int] = []

    @gpumemx.retry_on_oom(batch_size=64)
    def train(data: str, batch_size: int = 0, *, more: int = 1) -> tuple[str, int, int]:
        seen.append(batch_size)
        if batch_size > 20:
            run_out()
        return data, batch_size, more

    assert train("a", batch_size=10) == ("a", 10, 1)
    assert train("b", 40, more=2) == ("b", 20, 2)
    assert train(data="c") == ("c", 20, 1)
    assert train("d", 7) == ("d", 7, 1)
    assert seen == [10, 40, 20, 20, 7]
    assert train.retry.fits == 20  # type: ignore[attr-defined]
    assert train.__name__ == "train"


@pytest.mark.parametrize(
    ("start", "limit", "expected"),
    [
        (64, 20, [(64, 1), (32, 2), (16, 4)]),
        (96, 10, [(96, 1), (48, 2), (24, 4), (12, 8), (6, 16)]),
        (45, 8, [(45, 1), (15, 3), (5, 9)]),
        (7, 3, [(7, 1), (1, 7)]),
    ],
)
def test_the_effective_batch_stays_the_same(
    start: int, limit: int, expected: list[tuple[int, int]]
) -> None:
    seen: list[tuple[int, int]] = []

    @gpumemx.retry_on_oom(batch_size=start)
    def train(*, batch_size: int, accumulation_steps: int) -> None:
        seen.append((batch_size, accumulation_steps))
        if batch_size > limit:
            run_out()

    train()
    train()
    assert seen == [*expected, expected[-1]]
    assert {size * steps for size, steps in seen} == {start}


def test_the_search_keeps_the_effective_batch_too() -> None:
    seen: list[int] = []

    @gpumemx.retry_on_oom(batch_size=120, search=True)
    def train(batch_size: int, accumulation_steps: int) -> None:
        assert batch_size * accumulation_steps == 120
        seen.append(batch_size)
        if batch_size > 25:
            run_out()

    for _ in range(5):
        train()  # type: ignore[call-arg]
    assert seen == [120, 60, 30, 15, 20, 24, 24, 24]


def test_gradients_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(3)
    weight = torch.randn(5, requires_grad=True)
    data = torch.randn(24, 5)

    def step(batch_size: int, limit: int) -> Any:
        weight.grad = None
        for part in data.split(batch_size):
            if len(part) > limit:
                if weight.grad is None:
                    (part @ weight).square().mean().backward()  # it fails with gradients half done
                run_out()
            ((part @ weight).square().mean() * len(part) / len(data)).backward()
        return weight.grad

    whole = step(24, 24).clone()
    parts = gpumemx.retry_on_oom(batch_size=24)(step)(limit=7)
    torch.testing.assert_close(parts, whole)


def test_without_a_size_it_is_called_again_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    retries: list[gpumemx.Retry] = []

    @gpumemx.retry_on_oom
    def once(fails: int) -> str:
        calls.append(alive())
        return variants.step(len(calls) <= fails)

    with caplog.at_level(logging.WARNING, "gpumemx"):
        once(1)
    assert calls == [0, 0]
    assert "once ran out of memory, and is called again: " in caplog.text
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        once(2)

    calls.clear()

    @gpumemx.retry_on_oom(attempts=3, on_retry=retries.append)
    def thrice(fails: int) -> str:
        calls.append(alive())
        return variants.step(len(calls) <= fails)

    assert thrice(3) == f"{MIB} done"
    assert calls == [0] * 4
    assert [retry.name for retry in retries] == [thrice.__qualname__] * 3


def test_an_error_of_another_kind_is_raised_at_once() -> None:
    calls: list[int] = []

    @gpumemx.retry_on_oom(batch_size=8)
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise KeyError(batch_size)

    with pytest.raises(KeyError):
        train()  # type: ignore[call-arg]
    assert calls == [8]


def test_the_next_attempt_is_not_made_in_the_except_block() -> None:
    @gpumemx.retry_on_oom(batch_size=2)
    def train(batch_size: int) -> None:
        if batch_size == 2:
            run_out()
        assert sys.exc_info() == (None, None, None)
        raise KeyError("a bug")

    with pytest.raises(KeyError) as caught:
        train()  # type: ignore[call-arg]
    assert caught.value.__context__ is None


def test_misuse_is_refused_when_decorating() -> None:
    with pytest.raises(TypeError, match="has no such parameter"):
        gpumemx.retry_on_oom(batch_size=4)(lambda x: x)
    with pytest.raises(TypeError, match="cannot call the generator"):

        @gpumemx.retry_on_oom(batch_size=4)
        def batches(batch_size: int) -> Iterator[int]:
            yield batch_size

    for options in ({"batch_size": 0}, {"batch_size": True}, {"batch_size": 2.5}, {"attempts": 0}):
        with pytest.raises(ValueError, match="is a whole number from 1 on, not"):
            gpumemx.retry_on_oom(**options)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="the minimum 9 is more than the batch_size 4"):
        gpumemx.retry_on_oom(batch_size=4, minimum=9)


# --- where it does not work, and without torch


def test_with_several_ranks_it_refuses() -> None:
    text = """
    import os, tempfile
    import gpumemx, torch, torch.distributed as dist
    calls = []
    @gpumemx.retry_on_oom(batch_size=4)
    def train(batch_size):
        calls.append(batch_size)
        if batch_size > 2: raise torch.OutOfMemoryError("CUDA out of memory. Tried")
    train()
    assert calls == [4, 2]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        def guarded():
            with gpumemx.oom_guard(): calls.append(0)
        for use in (gpumemx.recover, guarded, train):
            try:
                use()
                raise AssertionError(use)
            except gpumemx.RecoveryError as error:
                assert "torch.distributed is initialized, with 1 rank(s)" in str(error), error
                assert "out of memory" not in str(error)
        assert calls == [4, 2]
        dist.destroy_process_group()
    train()
    assert calls == [4, 2, 2]
    """
    done = program(text)
    assert done.returncode == 0, done.stderr


def test_without_torch_it_still_works() -> None:
    text = """
    import sys
    import gpumemx
    calls = []
    @gpumemx.retry_on_oom(batch_size=4)
    def train(batch_size):
        calls.append(batch_size)
        if batch_size > 1: raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return batch_size
    assert train() == 1 and calls == [4, 2, 1]
    assert "torch" not in sys.modules
    """
    done = program(text)
    assert done.returncode == 0, done.stderr
    said = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert said == [
        f"train ran out of memory with batch size {size}, and is called again with {size // 2}"
        for size in (4, 2)
    ]
