# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmarks of this folder share: torch on each allocator, in processes, and tables.

A Worker is a process that has imported torch on one kind of allocator and has not started CUDA. It
forks for every job, so that each job is a process of its own, with an allocator and a device
context that nobody has used, without importing torch each time. Jobs are asked for one after the
other: what is compared alternates, and a drift of the machine meets all.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
CONF = "PYTORCH_CUDA_ALLOC_CONF"
ALLOCATORS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "async": "backend:cudaMallocAsync",
    "gpumemx": "",
}
Job = dict[str, Any]
Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser, *, runs: int) -> None:
    parser.add_argument(
        "--allocators",
        nargs="+",
        choices=ALLOCATORS,
        default=list(ALLOCATORS),
        help="default: all; async is cudaMallocAsync",
    )
    parser.add_argument("--runs", type=int, default=runs, help=f"of each kind; default: {runs}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU: a dry run")
    parser.add_argument("--serve", help=argparse.SUPPRESS)


# --- in the parent


class Worker:
    """One kind of allocator. `run` returns what the script's `work` returned in a new process."""

    def __init__(self, allocator: str, *, counted: bool = False) -> None:
        environment = {**os.environ, CONF: ALLOCATORS[allocator]}
        if counted:
            there = os.environ.get("LD_PRELOAD", "")
            environment["LD_PRELOAD"] = f"{call_counter()} {there}".strip()
        self.command = [sys.executable, sys.argv[0], "--serve", allocator]
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, **job: Any) -> Result:
        self.send(**job)
        return self.receive()

    def send(self, **job: Any) -> None:
        """Begin a job, whose result is to be received before the next one is sent."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(job), file=self.process.stdin, flush=True)

    def receive(self) -> Result:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                result: Result = json.loads(line)
                return result
            print(line, end="")
        raise SystemExit(f"a worker has ended: {' '.join(self.command)}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if kind is not None:
            self.process.terminate()
        self.process.wait()


def call_counter() -> Path:
    """Return the library to preload; it is beside the module, wherever that was built."""
    spec = importlib.util.find_spec("allocator_probe")
    if spec is None or spec.origin is None:
        raise SystemExit("allocator_probe is not built, or not on PYTHONPATH: see README.md")
    return Path(spec.origin).with_name("libcall_counter.so")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, the first column to the left and all others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        print(f"{line[0]:<{widths[0]}}", *cells, sep="  ", flush=True)


def median(values: Iterable[float]) -> float:
    """Return the median, or not-a-number of nothing."""
    found = list(values)
    return statistics.median(found) if found else float("nan")


def show(value: float | None, form: str) -> str:
    """Format a number; '-' stands for one that is not there."""
    return "-" if value is None or value != value else f"{value:{form}}"


# --- in the processes of a worker


def serve(allocator: str, work: Callable[[Job], Result], *, device_is_started: bool = True) -> None:
    """Answer jobs from stdin until it ends, each in a child.

    `device_is_started` is for a script that uses the current device; another chooses its own.
    """
    import torch

    if allocator == "gpumemx":
        import gpumemx  # noqa: F401  (before the fork, like torch)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            job = json.loads(line)
            try:
                if not (job["tiny"] or job.get("nothing")):
                    start(allocator, device_is_started=device_is_started)
                print(json.dumps(work(job)), flush=True)
            except torch.OutOfMemoryError as error:
                print(json.dumps({"failed": f"out of memory: {str(error)[:200]}"}), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            exit_code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"failed": f"exit status {exit_code}"}), flush=True)


def start(allocator: str, *, device_is_started: bool = True) -> None:
    """Install gpumemx if that is the one, and start CUDA."""
    import torch

    if allocator == "gpumemx":
        import gpumemx

        gpumemx.install_allocator()
        if not gpumemx.is_installed():
            raise SystemExit("GPUMEMX_DISABLE is set")
    if device_is_started:
        torch.zeros(1, device="cuda")
    wanted = "cudaMallocAsync" if allocator == "async" else "native"
    backend = torch.cuda.get_allocator_backend()
    if allocator != "gpumemx" and backend != wanted:
        raise SystemExit(f"torch's allocator is {backend}, not {wanted}")


def set_cap(cap: int | None) -> None:
    """Let torch have `cap` bytes of the device; all of it for None."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else min(1.0, cap / total))


def driver_figures() -> dict[str, Any]:
    """Return gpumemx's driver calls and seconds, or nothing with another allocator."""
    from gpumemx import _adapter

    adapter = _adapter.installed()
    figures: dict[str, Any] = adapter.driver_figures(0) if adapter else {}  # type: ignore[attr-defined]
    return figures


def calls_made(name: str) -> int:
    """Return how often the process has called a function of CUDA's runtime; call_counter.cpp."""
    counter = ctypes.CDLL(None).calls_made
    counter.restype = ctypes.c_uint64
    counter.argtypes = [ctypes.c_char_p]
    return int(counter(name.encode()))
