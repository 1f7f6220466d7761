# SPDX-License-Identifier: BSD-3-Clause
"""What is compared while all workers stand still: the driver's view, and snapshots."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from gpumemx import _adapter

MIB = 1 << 20
ROUND = 512


def rounded(tensor: torch.Tensor) -> int:
    return (tensor.untyped_storage().nbytes() + ROUND - 1) // ROUND * ROUND


def returning() -> int:
    """Bytes that are not reserved any more and not with the device again yet."""
    ours = _adapter.installed()
    return 0 if ours is None else ours.paths(0)["returning_bytes"]


def used_on_device() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def used_by_this_process() -> int:
    """As the management library says: for a card that other processes use meanwhile."""
    import pynvml  # the package nvidia-ml-py

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    (used,) = [p.usedGpuMemory for p in processes if p.pid == os.getpid()]
    return int(used)


def gone(used: Callable[[], int]) -> tuple[int, bool]:
    """What is used besides what is reserved, in bytes; what is on its way back counts as reserved.

    The background thread may be giving memory back just now, and the counters are read one after
    the other: only three equal readings in a row count, 2 ms apart. False when there were none.
    """
    last, equal = None, 0
    for _ in range(200):
        others = used() - torch.cuda.memory_reserved() - returning()
        equal = equal + 1 if others == last else 1
        if equal == 3:
            return others, True
        last = others
        time.sleep(0.002)
    return others, False


class Unexplained:
    """Reserved memory against what the driver says is gone: signed, and what was there at the most.

    Positive: more is gone than is reserved. The driver's own memory, for page tables of mapped
    addresses or for graphs, would grow with the figures that are kept.
    """

    def __init__(self, used: Callable[[], int]) -> None:
        self.used = used
        self.others, settled = gone(used)
        self.unsettled = 0 if settled else 1
        self.least = self.most = 0
        self.largest = 0
        self.at_largest = ""

    def look(self, graphs: int) -> None:
        others, settled = gone(self.used)
        self.unsettled += not settled
        value = others - self.others
        self.least, self.most = min(self.least, value), max(self.most, value)
        if abs(value) > abs(self.largest):
            self.largest = value
            self.at_largest = figures(graphs)

    def text(self) -> str:
        text = f"{self.least / MIB:+.2f} to {self.most / MIB:+.2f} MiB unexplained"
        if self.unsettled:
            text += f" ({self.unsettled} times the readings did not come to rest)"
        return text


def figures(graphs: int) -> str:
    """What the driver may keep memory for, now."""
    shown = sum(s["total_size"] for s in torch.cuda.memory_snapshot())
    text = (
        f"reserved {torch.cuda.memory_reserved() / MIB:.2f} MiB, in segments {shown / MIB:.2f}, "
        f"{graphs} graphs"
    )
    ours: Any = _adapter.installed()
    if ours is None:
        return text
    paths, calls = ours.paths(0), ours.driver_figures(0)["calls"]

    def left(begin: str, end: str) -> int:
        return calls.get(begin, 0) - calls.get(end, 0)

    return text + (
        f", returning {paths['returning_bytes'] / MIB:.2f} MiB, "
        f"{paths['dormant_aliases']} dormant aliases; "
        f"{left('map', 'unmap')} mappings of {left('create', 'release')} handles, "
        f"{left('reserve', 'unreserve')} address ranges, "
        f"{calls.get('export_handle', 0)} handles exported so far"
    )


class History:
    """torch's memory history, switched at random, and snapshots against the counters."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.compared = 0
        self.wrong = 0
        self.switched = 0

    def switch(self) -> None:
        r = self.random
        enabled = r.choice((None, "state", "all", "all")) if self.switched else "all"
        if enabled is None:
            torch.cuda.memory._record_memory_history(None)
        else:
            torch.cuda.memory._record_memory_history(
                enabled,
                context=r.choice((None, "alloc", "state", "all")),
                stacks="python",
                max_entries=r.choice((1, 10, 1000)),
            )
        self.switched += 1

    def off(self) -> None:
        torch.cuda.memory._record_memory_history(None)

    def compare(self) -> None:
        """Compare a snapshot with the counters.

        On gpumemx the segments are the memory that stands at an address. What stands nowhere is
        reserved too, or on its way back, which only grows less while all stand still; what is in
        use, or cannot be given back because of that, stands somewhere.
        """
        ours = _adapter.installed()
        # Of gpumemx one figure that has both, so that nothing can move between two readings.
        most = torch.cuda.memory_reserved() if ours is None else ours.memory_info(0)["reserved"]
        segments = torch.cuda.memory._snapshot()["segments"]
        stats = torch.cuda.memory_stats()
        if ours is None:
            least = most
        else:
            names = ("active_bytes", "inactive_split_bytes")
            least = sum(stats[f"{name}.all.current"] for name in names)
        in_use = sum(
            block["size"]
            for segment in segments
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        in_segments = sum(s["total_size"] for s in segments)
        in_blocks = sum(b["size"] for s in segments for b in s["blocks"])
        allocated = stats["allocated_bytes.all.current"]
        self.compared += 1
        if in_use == allocated and least <= in_segments <= most and in_blocks == in_segments:
            return
        self.wrong += 1
        print(
            f"snapshot: blocks in use {in_use}, allocated {allocated}; segments {in_segments}, "
            f"all their blocks {in_blocks}, to be between {least} and {most}"
        )

    def at_gate(self) -> None:
        if self.compared == 0 or self.random.random() < 0.3:
            self.compare()
        if self.switched == 0 or self.random.random() < 0.5:
            self.switch()
