# SPDX-License-Identifier: BSD-3-Clause
"""The ways in which a failed step's tensors stay alive, each as a step that runs out of memory.

A step makes tensors, writes them down by weak references to their storages, and fails if it is told
to. The tensors are on the CPU and the error is raised by hand, unless a GPU is asked for.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MIB = 1 << 20
TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8.00 GiB"

Step = Callable[[bool], Any]
made: list[StorageWeakRef] = []
kept: list[Any] = []  # what the program stores
device = "cpu"  # tests/gpu sets it to "cuda", and the errors are real


def big() -> torch.Tensor:
    tensor = torch.zeros(MIB, dtype=torch.uint8, device=device)
    made.append(StorageWeakRef(tensor.untyped_storage()))
    return tensor


def alive() -> int:
    return sum(not ref.expired() for ref in made)


def run_out() -> None:
    if device != "cpu":
        torch.empty(1 << 44, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError(TEXT)


def step(fails: bool) -> str:
    activations = big()
    if fails:
        run_out()
    return f"{activations.numel()} done"


def caught_and_raised_inside(fails: bool) -> str:
    try:
        return step(fails)
    except torch.OutOfMemoryError as error:
        mine = big()
        raise error from None
        del mine


def nested(fails: bool) -> str:
    def inner() -> str:
        there = big()
        return step(fails) + str(there.numel())

    outer = [big(), {"more": (big(),)}]
    return inner() + str(len(outer))


def with_context(fails: bool) -> str:
    def other() -> None:
        part = big()
        raise KeyError(part.numel())

    try:
        other()
    except KeyError:
        return step(fails)
    raise AssertionError("not reached")


class StepError(Exception):
    pass


def with_cause(fails: bool) -> str:
    try:
        return step(fails)
    except torch.OutOfMemoryError as error:
        raise StepError("the step failed") from error


def raised_again_above(fails: bool) -> str:
    def middle() -> str:
        here = big()
        try:
            return step(fails)
        except Exception:
            _ = here
            raise

    try:
        return middle()
    except Exception as error:
        raise error


def stored_in_a_list(fails: bool) -> str:
    def attempt() -> None:
        here = big()
        try:
            step(fails)
        except torch.OutOfMemoryError as error:
            kept.append(error)
        _ = here

    def caller() -> None:
        # Returns, and yet it is kept: the frames of the error have it as the one that called them.
        above = big()
        attempt()
        _ = above

    before = len(kept)
    caller()
    if len(kept) > before:
        raise torch.OutOfMemoryError(TEXT)
    return "done"


def of_an_interactive_session(fails: bool) -> str:
    try:
        return step(fails)
    except torch.OutOfMemoryError as error:
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = error.__traceback__
        raise


def in_a_generator(fails: bool) -> str:
    def batches() -> Any:
        prefetched = big()
        for _ in range(2):
            yield prefetched.numel()

    def results() -> Any:
        here = big()
        suspended = batches()
        for _ in suspended:
            yield step(fails) + str(here.numel())

    return "".join(results())


def in_an_async_task(fails: bool) -> str:
    async def work() -> str:
        here = big()
        await asyncio.sleep(0)
        return step(fails) + str(here.numel())

    async def main() -> str:
        task = asyncio.create_task(work())
        kept.append(task)
        return await task

    return asyncio.run(main())


def in_a_thread(fails: bool) -> str:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(step, fails)
        kept.append(future)
        return future.result()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.myself, ctx.fails = ctx, fails  # a cycle that only the garbage collector ends
        return x.float().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        workspace = big()
        if ctx.fails:
            run_out()
        return grad.expand(workspace.numel()), None


def out_of_backward(fails: bool) -> str:
    x = torch.ones((), requires_grad=True, device=device)
    activations = big() * x
    made.append(StorageWeakRef(activations.untyped_storage()))
    loss = Double.apply(activations, fails)
    loss.backward()
    return "done"


class Collate:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError(TEXT)  # in a process of its own, which has no CUDA
        return torch.zeros(len(samples))


def in_a_worker_of_a_loader(fails: bool) -> str:
    from torch.utils.data import DataLoader

    loader = DataLoader(range(4), batch_size=2, num_workers=1, collate_fn=Collate(fails))  # type: ignore[arg-type,var-annotated]
    here = big()
    return f"{sum(map(len, loader))} {here.numel()} done"


VARIANTS: dict[str, Step] = {
    "inside the except block": caught_and_raised_inside,
    "after the except block": step,
    "in a nested function": nested,
    "with a context": with_context,
    "with a cause": with_cause,
    "raised again and caught above": raised_again_above,
    "stored in a list": stored_in_a_list,
    "in sys.last_exc": of_an_interactive_session,
    "in a generator": in_a_generator,
    "in an async task": in_an_async_task,
    "in a thread": in_a_thread,
    "out of backward": out_of_backward,
    "in a worker of a DataLoader": in_a_worker_of_a_loader,
}


def forget_all() -> None:
    made.clear()
    kept.clear()
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)


def in_new_thread(work: Callable[[], Any]) -> Any:
    """Do it in a thread and return what it returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]
