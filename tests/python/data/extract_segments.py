#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Take the allocator's events out of a torch memory snapshot.

extract_segments.py IN.pickle OUT.npz. README.md beside it says what is in the result. A snapshot is
a pickle of plain values; one that names a class or a function is refused, so nothing in it can run.
"""

import pickle
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

ACTIONS = {"segment_alloc": 0, "segment_free": 1, "alloc": 2, "free_completed": 3}


class PlainUnpickler(pickle.Unpickler):
    """Reads values only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the file wants {module}.{name}; a snapshot has values only")


def main(source: str, target: str) -> None:
    with Path(source).open("rb") as file:
        snapshot: dict[str, Any] = PlainUnpickler(file).load()
    (trace,) = [events for events in snapshot["device_traces"] if events]
    kept = [event for event in trace if event["action"] in ACTIONS]
    streams: dict[int, int] = {}
    np.savez_compressed(
        target,
        action=np.array([ACTIONS[event["action"]] for event in kept], np.int8),
        size=np.array([event["size"] for event in kept], np.int64),
        address=np.array([event["addr"] for event in kept], np.int64),
        stream=np.array([streams.setdefault(e["stream"], len(streams)) for e in kept], np.int16),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
