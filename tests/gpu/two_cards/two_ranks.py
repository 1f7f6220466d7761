# SPDX-License-Identifier: BSD-3-Clause
"""A program as two ranks, each a process with a device of its own: starting them, and joining."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RANKS = 2
_TOLD = "result "
# For programs with several communicators at a time: a kernel of NCCL's waits on the device for the
# other rank's, and they all must find room there. A kernel that is loaded late may wait for them.
FEW_BLOCKS = {"NCCL_MAX_CTAS": "8", "NCCL_MAX_NCHANNELS": "8", "CUDA_MODULE_LOADING": "EAGER"}
PATIENCE = 20  # seconds that one rank gets to end after the other has failed


# --- in the parent


def run_ranks(
    script: str, arguments: Sequence[str], *, limit: float, **environment: str
) -> list[tuple[int, str]]:
    """Run `script --rank R --store FILE arguments` for both ranks; their exit statuses and output.

    What a rank prints goes to a file, so none waits for a reader. When one fails, both are ended.
    """
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        processes, logs = [], []
        for rank in range(RANKS):
            logs.append(Path(folder, f"{rank}.log"))
            words = ["--rank", str(rank), "--store", str(Path(folder, "store"))]
            with logs[-1].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, script, *words, *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **environment},
                    )
                )
        until = time.monotonic() + limit
        while any(p.poll() is None for p in processes) and time.monotonic() < until:
            if any(p.poll() for p in processes):  # one has failed
                until = min(until, time.monotonic() + PATIENCE)
            time.sleep(0.1)
        for process in processes:
            process.kill()
        return [
            (process.wait(), log.read_text(errors="replace"))
            for process, log in zip(processes, logs, strict=True)
        ]


def results_of(ranks: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return what the ranks told by `tell`; of one that failed its last lines are printed."""
    results: list[dict[str, Any]] = []
    for rank, (status, text) in enumerate(ranks):
        lines = text.splitlines()
        found = [json.loads(line[len(_TOLD) :]) for line in lines if line.startswith(_TOLD)]
        if status != 0 or not found:
            print(f"rank {rank} ended with {status}; its last lines:", *lines[-25:], sep="\n  ")
            continue
        results += found
    return results


# --- in a rank


def tell(result: dict[str, Any]) -> int:
    """Tell the parent how it went; return the exit status."""
    print(_TOLD + json.dumps(result), flush=True)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allocator", choices=("gpumemx", "native"), default="gpumemx")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)


def join(args: argparse.Namespace) -> torch.device:
    """Install the allocator, begin the process group, and return this rank's device."""
    import torch
    import torch.distributed as dist

    if args.allocator == "gpumemx" and args.device == "cuda":
        import gpumemx

        gpumemx.install_allocator()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", args.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        store=dist.FileStore(args.store, RANKS),
        rank=args.rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
        device_id=device if args.device == "cuda" else None,
    )
    return device


def handles_moved(device: torch.device) -> int | None:
    """Return how many handles gpumemx has moved to other addresses, or None without it."""
    if device.type != "cuda":
        return None
    from gpumemx import _adapter

    adapter = _adapter.installed()
    if adapter is None:
        return None
    paths = adapter.paths(device.index)  # type: ignore[attr-defined]
    return sum(paths[f"harvested_{kind}"] for kind in ("own", "loose", "other"))
