# SPDX-License-Identifier: BSD-3-Clause
"""A second process that receives tensors and counts their wrong words.

A pipe, not a queue: it pickles, and so shares, in the thread that sends, which can hold the lock
that keeps captures away; a queue does it in a thread of its own. And a lost end is noticed.

The consumer counts on the host and has let the tensor go before it answers, so that the memory of
this device that it has stays what it was when it started, and the producer's goes at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp

from .graphs import capture_lock

LARGEST = 16 << 20  # bytes of a tensor that is shared
PATIENCE = 90  # seconds


def consume(pipe: Connection, torchs_own: bool) -> None:
    """Run in the consumer: answer each (tensor, value) with the wrong words, or with an error."""
    try:
        if not torchs_own:
            import gpumemx

            gpumemx.install_allocator()
        torch.cuda.set_device(0)
        torch.empty(1, device="cuda")
        pipe.send(0)
        while (message := pipe.recv()) is not None:
            tensor, value = message
            del message
            wrong = int((tensor.cpu() != value).sum())
            del tensor  # unmapped, and counted down for the producer
            pipe.send(wrong)
    except EOFError:
        pass  # the main process has ended
    except Exception:
        pipe.send(traceback.format_exc())


class Consumer:
    """The consumer's process, as all workers use it."""

    def __init__(self, torchs_own: bool) -> None:
        context = mp.get_context("spawn")
        self.lock = threading.Lock()  # one tensor at a time
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=consume, args=(theirs, torchs_own), daemon=True)
        self.process.start()
        theirs.close()  # so that its end is the pipe's

    def answer(self) -> int:
        """Wait for what the consumer says: the wrong words of the last tensor, 0 for its start."""
        until = time.monotonic() + PATIENCE
        while not self.pipe.poll(1):
            if time.monotonic() > until:
                raise RuntimeError("the consumer does not answer")
        try:
            said = self.pipe.recv()
        except EOFError:
            raise RuntimeError("the consumer has ended") from None
        if isinstance(said, str):
            raise RuntimeError(f"the consumer failed: {said}")
        return int(said)

    def check(self, tensor: torch.Tensor, value: int, stream: torch.cuda.Stream) -> int:
        """Share a tensor that was filled on `stream`. Return how many words arrived wrong."""
        with self.lock:
            with torch.cuda.stream(stream), capture_lock:
                self.pipe.send((tensor, value))
            return self.answer()

    def warm_up(self) -> int:
        """Wait for its start; share tensors of all sizes. Return the wrong words."""
        self.answer()
        stream = torch.cuda.current_stream()
        wrong = 0
        for words in (1000, (3 << 18) + 1, LARGEST // 4):
            tensor = torch.full((words,), words, dtype=torch.int32, device="cuda")
            wrong += self.check(tensor, words, stream)
        return wrong

    def end(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(OSError):  # it is ending already
                self.pipe.send(None)
            self.process.join(30)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(10)
        self.pipe.close()
