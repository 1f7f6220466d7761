# SPDX-License-Identifier: BSD-3-Clause
"""What the extension says of a snapshot, made by hand: for tests of what is done with it."""

from typing import Any

MIB = 1 << 20


def device(index: int = 0, **changed: Any) -> dict[str, Any]:
    """Return one device's part: five events, the third one the peak, a request that failed."""
    mib = MIB
    return {
        "device": index,
        "events": 5,
        "recording": {
            "state": "on",
            "overflowed": False,
            "baseline_bytes": 0,
            "unknown_frees": 0,
        },
        "live_now": 100 * mib,
        "reserved_now": 800 * mib,
        "peak": {"event": 2, "time_us": 1_002_500_000, "live": 600 * mib, "reserved": 800 * mib},
        "alive_at_peak": {
            "by_site": [
                {"site": "train.py:20", "bytes": 400 * mib, "count": 2},
                {"site": "[red]model.py[bold]:7", "bytes": 150 * mib, "count": 3},
                {"site": "(no frames)", "bytes": 30 * mib, "count": 1},
                {"site": "data.py:1", "bytes": 20 * mib, "count": 1234},
            ],
            "by_size_class": [
                {"class": "up to 1 MiB", "bytes": 20 * mib, "count": 1234},
                {"class": "above 1 MiB", "bytes": 580 * mib, "count": 6},
            ],
            "by_category": [
                {"category": "activations", "bytes": 450 * mib, "count": 1236},
                {"category": "parameters", "bytes": 150 * mib, "count": 4},
            ],
        },
        "fragmentation": {
            "reserved": 800 * mib,
            "live": 600 * mib,
            "largest_free": 120 * mib,
            "free_in_busy_segments": 150 * mib,
            "lonely_segments": [
                {"address": 0x7F00, "size": 20 * mib, "held_by": "data.py:1", "bytes": 512},
                {"address": 0x9F00, "size": 64 * mib, "held_by": "train.py:20", "bytes": 1024},
            ],
        },
        "ooms": [
            {
                "event": 3,
                "requested": 300 * mib,
                "device_free": 50 * mib,
                "live": 600 * mib,
                "reserved": 800 * mib,
                "meaning": "The holes are too small.",
            }
        ],
        "series": {
            "time_us": [1_000_000_000, 1_001_000_000, 1_002_500_000, 1_002_500_000, 1_003_000_000],
            "live": [100 * mib, 400 * mib, 600 * mib, 600 * mib, 100 * mib],
            "reserved": [400 * mib, 400 * mib, 800 * mib, 800 * mib, 800 * mib],
        },
        **changed,
    }


def without_history(state: str) -> dict[str, Any]:
    """Return a device of which only what was live at the end is known."""
    mib = MIB
    return device(
        events=0,
        recording={
            "state": state,
            "overflowed": False,
            "baseline_bytes": 100 * mib,
            "unknown_frees": 0,
        },
        peak={"event": 0, "time_us": None, "live": 100 * mib, "reserved": 800 * mib},
        ooms=[],
        series={"time_us": [], "live": [], "reserved": []},
    )


def snapshot(*devices: dict[str, Any]) -> dict[str, Any]:
    return {"file": "s.pickle", "schema": "torch 2.11", "devices": list(devices)}


def recorded() -> dict[str, Any]:
    """Return a snapshot as torch writes one: two blocks in one segment, one freed again."""
    frames = [{"name": "main", "filename": "train.py", "line": 20}]

    def event(action: str, offset: int, size: int, time_us: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": 0x7F0000000000 + offset,
            "size": size,
            "stream": 0,
            "time_us": time_us,
            "frames": frames,
        }

    block = {"requested_size": 8 * MIB, "size": 8 * MIB, "frames": frames}
    free = {"requested_size": 0, "size": 12 * MIB, "frames": []}
    segment = {
        "device": 0,
        "address": 0x7F0000000000,
        "total_size": 20 * MIB,
        "allocated_size": 8 * MIB,
        "active_size": 8 * MIB,
        "requested_size": 8 * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [
            {**block, "address": 0x7F0000000000, "state": "active_allocated"},
            {**free, "address": 0x7F0000000000 + 8 * MIB, "state": "inactive"},
        ],
    }
    trace = [
        event("segment_alloc", 0, 20 * MIB, 1000),
        event("alloc", 0, 8 * MIB, 1001),
        event("alloc", 8 * MIB, 4 * MIB, 2002),
        event("free_requested", 8 * MIB, 4 * MIB, 3003),
        event("free_completed", 8 * MIB, 4 * MIB, 3003),
    ]
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}
