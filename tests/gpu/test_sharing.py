# SPDX-License-Identifier: BSD-3-Clause
"""CUDA tensors shared between processes: gpumemx with gpumemx, with stock torch, both ways.

Every test is a program of its own (this file, run with a scenario's name): an allocator can be
chosen once in a process, and the killed, the left over and the exit status are part of what is
looked at. The sides of a program are told which allocator to take:

    gpumemx     gpumemx, as it is
    plain       gpumemx in plain mode: ordinary device allocations, legacy IPC
    stock       torch's own allocator: legacy IPC
    expandable  torch's own with expandable segments

Run: python -m pytest tests/gpu/test_sharing.py. Skipped, with the reason, without a device and
where a process may take no descriptors from another.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

MIB = 1 << 20
PATIENCE = 120  # seconds that one side waits for the other

PAIRS = [
    ("gpumemx", "gpumemx"),
    ("gpumemx", "stock"),
    ("stock", "gpumemx"),
    ("expandable", "gpumemx"),
    ("plain", "stock"),
    ("plain", "gpumemx"),
]

# --- what both sides do


def settings_of(kind: str) -> dict[str, str]:
    return {
        "gpumemx": {},
        "plain": {"GPUMEMX_CONF": "mode:plain"},
        "stock": {},
        "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    }[kind]


def begin(kind: str) -> None:
    """Choose the allocator of this process. Its settings are in the environment already."""
    if kind in ("gpumemx", "plain"):
        import gpumemx

        gpumemx.install_allocator()
    import torch

    torch.cuda.set_device(0)
    torch.empty(1, device="cuda")


def pattern(size: int, seed: int) -> Any:
    """`size` bytes (a multiple of 4) on the device; no two places or seeds have the same."""
    import torch

    return torch.arange(size // 4, dtype=torch.int32, device="cuda").mul_(3).add_(seed * 1_000_003)


def check(tensor: Any, seed: int, what: str) -> None:
    import torch

    expected = pattern(tensor.numel() * 4, seed)
    if torch.equal(tensor, expected):
        return
    wrong = int((tensor != expected).sum())
    raise AssertionError(f"{what}: {wrong} of {tensor.numel()} words are wrong")


class Churn:
    """Random allocations, each checked when it dies; sometimes all cache is given back."""

    def __init__(self, seed: int, limit: int = 1500 * MIB) -> None:
        self.random = random.Random(seed)
        self.limit = limit
        self.live: list[tuple[Any, int]] = []
        self.bytes = 0
        self.seed = seed * 1000

    def size(self) -> int:
        r = self.random
        kind = r.random()
        if kind < 0.4:
            return 4 * r.randrange(1, 200_000)
        if kind < 0.7:
            return r.choice([2, 4, 10, 20, 64, 98, 130]) * MIB
        return 4 * r.randrange(MIB // 4, 20 * MIB)

    def step(self) -> None:
        import torch

        r = self.random
        for _ in range(r.randrange(1, 5)):
            size = self.size()
            if self.bytes + size < self.limit:
                self.seed += 1
                self.live.append((pattern(size, self.seed), self.seed))
                self.bytes += size
        while self.live and (self.bytes > self.limit // 2 or r.random() < 0.4):
            tensor, seed = self.live.pop(r.randrange(len(self.live)))
            check(tensor, seed, "a block of the churn")
            self.bytes -= tensor.numel() * 4
            del tensor
        if r.random() < 0.05:
            torch.cuda.empty_cache()

    def end(self) -> None:
        for tensor, seed in self.live:
            check(tensor, seed, "a block of the churn")
        self.live.clear()


def settle(target: int, what: str) -> None:
    """Wait until this process has at most `target` bytes allocated."""
    import torch

    until = time.monotonic() + PATIENCE
    while True:
        gc.collect()
        torch.cuda.ipc_collect()
        allocated = torch.cuda.memory_allocated()
        if allocated <= target:
            return
        if time.monotonic() > until:
            raise AssertionError(f"{what}: {allocated} bytes are still allocated, not {target}")
        time.sleep(0.01)


def child_main(kind: str, function: str, inbox: Any, outbox: Any) -> None:
    begin(kind)
    globals()[function](inbox, outbox)
    gc.collect()


class Child:
    """A spawned process that runs a function of this file, and a queue each way."""

    def __init__(self, kind: str, function: str) -> None:
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self.inbox = context.Queue()
        self.outbox = context.Queue()
        self.process = context.Process(
            target=child_main, args=(kind, function, self.inbox, self.outbox), daemon=True
        )
        names = ("GPUMEMX_CONF", "PYTORCH_ALLOC_CONF")
        before = {name: os.environ.pop(name, None) for name in names}
        os.environ.update(settings_of(kind))
        try:
            self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def send(self, message: Any) -> None:
        self.inbox.put(message)

    def receive(self) -> Any:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self.outbox.get(timeout=1)
            except queue.Empty:
                if not self.process.is_alive():
                    raise AssertionError(
                        f"the consumer ended with {self.process.exitcode}"
                    ) from None
                if time.monotonic() > until:
                    raise AssertionError("the consumer does not answer") from None

    def end(self) -> None:
        self.send(None)
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0, f"the consumer ended with {self.process.exitcode}"


# --- what consumers do


def check_and_write(inbox: Any, outbox: Any) -> None:
    """Check each tensor, write another pattern over it, and answer; allocate and free all along."""
    import torch

    churn = Churn(seed=2, limit=800 * MIB)
    while (message := inbox.get(timeout=PATIENCE)) is not None:
        for tensor, seed, new_seed in message:
            check(tensor, seed, "what was received")
            tensor.copy_(pattern(tensor.numel() * 4, new_seed))
        churn.step()
        for tensor, _, new_seed in message:
            check(tensor, new_seed, "what was received and written")
        torch.cuda.synchronize()
        del message, tensor
        gc.collect()
        outbox.put("done")
    churn.end()


def keep_until_told(inbox: Any, outbox: Any) -> None:
    """Keep what was received; check it whenever asked; drop it when told."""
    kept: list[tuple[Any, int]] = []
    while (message := inbox.get(timeout=PATIENCE)) is not None:
        if message == "check":
            for tensor, seed in kept:
                check(tensor, seed, "what was kept")
                del tensor  # or the last one would outlive the drop
            outbox.put(len(kept))
        elif message == "drop":
            kept.clear()
            gc.collect()
            outbox.put("dropped")
        else:
            kept += message
            del message
            outbox.put(len(kept))


# --- scenarios: each runs in the producer's process


def both_sides(consumer: str, seed: int = 1) -> None:
    """Tensors of all sizes, other content back, while both sides allocate, free and harvest."""
    import torch

    child = Child(consumer, "check_and_write")
    churn = Churn(seed)
    r = random.Random(seed)
    sizes = [4, 1000, 512 * 1024, MIB, 3 * MIB + 4, 11 * MIB + 4, 66 * MIB, 100 * MIB, 514 * MIB]
    for round_ in range(25):
        churn.step()
        chosen = sizes if round_ == 0 else r.sample(sizes[:-1], 4)
        batch = [
            (pattern(size, 100 * round_ + i), 100 * round_ + i, 100 * round_ + 50 + i)
            for i, size in enumerate(chosen)
        ]
        child.send(batch)
        churn.step()  # while the queue's thread shares them
        assert child.receive() == "done"
        for tensor, _, new_seed in batch:
            check(tensor, new_seed, "what came back")
        del batch, tensor
    child.end()
    churn.end()
    settle(2 * MIB, "after all was freed on both sides")
    torch.cuda.synchronize()


def work_goes_on(consumer: str) -> None:
    """The program uses a tensor, and its neighbours, while the queue's thread shares it."""
    import torch

    child = Child(consumer, "keep_until_told")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for i in range(40):
        before = pattern(7 * MIB + 4, 7000 + i)
        tensor = torch.zeros(25 * MIB + 2048 * i, dtype=torch.int32, device="cuda")
        after = pattern(5 * MIB + 4, 8000 + i)
        torch.cuda.synchronize()
        child.send([(tensor, 9000 + i)])
        for k in range(200):  # kernels, on all streams in turn, behind each other
            stream = streams[k % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                tensor.add_(1)
                before.add_(1)
                after.add_(1)
            torch.cuda.current_stream().wait_stream(stream)
        assert child.receive() == 1
        assert int(tensor.min()) == int(tensor.max()) == 200
        check(before.sub_(200), 7000 + i, "the block before")
        check(after.sub_(200), 8000 + i, "the block behind")
        tensor.copy_(pattern(tensor.numel() * 4, 9000 + i))
        torch.cuda.synchronize()
        child.send("check")
        assert child.receive() == 1
        child.send("drop")
        assert child.receive() == "dropped"
        del tensor, before, after
    child.end()


def one_block_many_tensors(consumer: str) -> None:
    """Views of one storage, and small tensors that stand on one handle, dropped in any order."""
    import torch

    child = Child(consumer, "keep_until_told")
    storage = torch.empty(50, 250_000, dtype=torch.int32, device="cuda")
    for i, row in enumerate(storage):
        row.copy_(pattern(1_000_000, 400 + i))
    views = [(row, 400 + i) for i, row in enumerate(storage)]
    small = [(pattern(100_000, 200 + i), 200 + i) for i in range(60)]
    child.send([*views, *small])
    assert child.receive() == 110
    child.send("check")
    assert child.receive() == 110
    random.Random(3).shuffle(small)
    del small[30:], views[10:], storage, row
    gc.collect()
    child.send("check")
    assert child.receive() == 110
    for tensor, seed in [*small, *views]:
        check(tensor, seed, "what the producer kept")
    child.send("drop")
    assert child.receive() == "dropped"
    for tensor, seed in [*small, *views]:
        check(tensor, seed, "what the producer kept")
    del tensor
    small.clear()
    views.clear()
    settle(2 * MIB, "after all was dropped")
    child.end()


def producer_drops_first(consumer: str) -> None:
    """What the producer has let go stays the consumer's until it is done, under pressure too."""
    import torch

    child = Child(consumer, "keep_until_told")
    for round_ in range(3):
        batch = [
            (pattern(size, 10 * round_ + i), 10 * round_ + i)
            for i, size in enumerate((1000, 3 * MIB + 4, 100 * MIB, 130 * MIB))
        ]
        child.send(batch)
        assert child.receive() == 4
        del batch
        gc.collect()
        churn = Churn(seed=round_ + 5)
        for _ in range(30):
            churn.step()
        torch.cuda.empty_cache()
        child.send("check")
        assert child.receive() == 4
        assert torch.cuda.memory_allocated() >= 233 * MIB
        churn.end()
        del churn
        child.send("drop")
        assert child.receive() == "dropped"
        settle(2 * MIB, "after the consumer was done")
    child.end()


def killed_consumer(consumer: str) -> None:
    """A consumer dies with tensors in its hands: the producer goes on, others receive them too."""
    import torch

    child = Child(consumer, "keep_until_told")
    batch = [(pattern(size, i), i) for i, size in enumerate((1000, 3 * MIB + 4, 100 * MIB))]
    child.send(batch)
    assert child.receive() == 3
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.join(PATIENCE)
    assert child.process.exitcode == -signal.SIGKILL
    churn = Churn(seed=9)
    for _ in range(30):
        churn.step()
    churn.end()
    for tensor, seed in batch:
        check(tensor, seed, "after the consumer was killed")
    second = Child(consumer, "keep_until_told")
    second.send(batch)
    assert second.receive() == 3
    second.send("check")
    assert second.receive() == 3
    second.send("drop")
    assert second.receive() == "dropped"
    second.end()
    # The dead one never counted down: its blocks stay in use, with torch's own allocator too.
    size = sum(t.numel() * 4 for t, _ in batch)
    del batch, tensor
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() >= size
    torch.cuda.empty_cache()


def mixed_handles(consumer: str) -> None:
    """A block over handles of several sizes is given some of one size, content and address kept."""
    from gpumemx import _adapter

    child = Child(consumer, "keep_until_told")
    paths = _adapter.load().paths
    kept: list[Any] = []
    for i, mib in enumerate((100, 98, 134, 514, 38)):
        tensor = pattern(mib * MIB, i)
        address = tensor.data_ptr()
        child.send([(tensor, i)])
        assert child.receive() == i + 1
        assert tensor.data_ptr() == address
        check(tensor, i, "after it was shared")
        kept.append(tensor)
    assert paths(0)["rebacked"] > 0
    rebacked = paths(0)["rebacked"]
    for i, tensor in enumerate(kept):
        child.send([(tensor, i)])
        child.receive()
    assert paths(0)["rebacked"] == rebacked  # once
    child.send("check")
    child.receive()
    child.send("drop")
    assert child.receive() == "dropped"
    del kept, tensor
    settle(2 * MIB, "after all was dropped")
    child.end()


def odd_neighbours(consumer: str) -> None:
    """Tensors that share handles with each other, sent in any order, from several threads' work."""
    child = Child(consumer, "keep_until_told")
    r = random.Random(4)
    sizes = [4 * r.randrange(MIB // 4, 6 * MIB) for _ in range(40)]
    tensors = [pattern(size, 300 + i) for i, size in enumerate(sizes)]
    order = list(range(40))
    r.shuffle(order)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            churn = Churn(seed=8, limit=400 * MIB)
            while not stop.is_set():
                churn.step()
            churn.end()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for n, i in enumerate(order):
        child.send([(tensors[i], 300 + i)])
        assert child.receive() == n + 1
    stop.set()
    thread.join()
    assert not errors, errors
    for i, tensor in enumerate(tensors):
        check(tensor, 300 + i, "a neighbour")
    child.send("check")
    assert child.receive() == 40
    child.send("drop")
    assert child.receive() == "dropped"
    child.end()


SCENARIOS = {
    f.__name__: f
    for f in (
        both_sides,
        work_goes_on,
        one_block_many_tensors,
        producer_drops_first,
        killed_consumer,
        mixed_handles,
        odd_neighbours,
    )
}


# --- the tests


def why_not() -> str:
    """Return why nothing can be shared here, or ''."""
    probe = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=300
    )
    if done.stdout.strip() != "True":
        return "there is no CUDA device, or no PyTorch with CUDA"
    return ""


def why_no_descriptors() -> str:
    """Return why a child may not take a descriptor of its parent, as a consumer does, or ''."""
    code = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "process = libc.syscall(434, os.getppid(), 0)\n"
        "fd = libc.syscall(438, process, 1, 0) if process >= 0 else -1\n"
        "print(0 if fd >= 0 else ctypes.get_errno())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    error = int(done.stdout)
    if error == 0:
        return ""
    return (
        f"a process may take no descriptors from another here: pidfd_getfd() says "
        f"{os.strerror(error)} (ptrace rights: --cap-add=SYS_PTRACE, kernel.yama.ptrace_scope=0)"
    )


def skip_or_fail(reason: str) -> None:
    if not reason:
        return
    if os.environ.get("GPUMEMX_REQUIRE_GPU") == "1":
        pytest.fail(f"GPUMEMX_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def device() -> None:
    skip_or_fail(why_not())


@pytest.fixture(scope="session")
def descriptors(device: None) -> str:
    return why_no_descriptors()


def run(scenario: str, producer: str, consumer: str, descriptors: str, seed: int = 0) -> None:
    if producer in ("gpumemx", "expandable"):
        skip_or_fail(descriptors)
    dropped = ("GPUMEMX_CONF", "GPUMEMX_DISABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    command = [sys.executable, __file__, scenario, "--producer", producer, "--consumer", consumer]
    if seed:
        command += ["--seed", str(seed)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**environment, **settings_of(producer)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


@pytest.mark.gpu
@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
@pytest.mark.parametrize("scenario", ["both_sides", "producer_drops_first", "killed_consumer"])
def test_between(scenario: str, producer: str, consumer: str, descriptors: str) -> None:
    run(scenario, producer, consumer, descriptors)


@pytest.mark.gpu
@pytest.mark.parametrize("consumer", ["gpumemx", "stock"])
@pytest.mark.parametrize("scenario", ["one_block_many_tensors", "mixed_handles", "work_goes_on"])
def test_from_gpumemx(scenario: str, consumer: str, descriptors: str) -> None:
    run(scenario, "gpumemx", consumer, descriptors)


@pytest.mark.gpu
@pytest.mark.parametrize("consumer", ["gpumemx", "stock"])
def test_neighbours_of_any_sizes(consumer: str, descriptors: str) -> None:
    run("odd_neighbours", "gpumemx", consumer, descriptors)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2, 8))
def test_batches_of_any_sizes_to_stock_torch(seed: int, descriptors: str) -> None:
    run("both_sides", "gpumemx", "stock", descriptors, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--producer", default="gpumemx")
    parser.add_argument("--consumer", default="gpumemx")
    parser.add_argument("--seed", type=int, help="of both_sides")
    args = parser.parse_args()
    begin(args.producer)
    if args.seed is None:
        SCENARIOS[args.scenario](args.consumer)
    else:
        both_sides(args.consumer, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
