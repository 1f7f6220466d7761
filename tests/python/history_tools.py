# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the memory history look at in a snapshot; used inside of tested programs too.

The schema is that of torch 2.11's own snapshots (taken with its allocator), and what later minors
added to it.
"""

from __future__ import annotations

from typing import Any

PAGE = 2 << 20

SEGMENT = {
    "device": int,
    "address": int,
    "total_size": int,
    "allocated_size": int,
    "active_size": int,
    "requested_size": int,
    "stream": int,
    "segment_type": str,
    "segment_pool_id": tuple,
    "is_expandable": bool,
    "frames": list,
    "blocks": list,
}
BLOCK = {"address": int, "size": int, "requested_size": int, "state": str, "frames": list}
ENTRY = {
    "action": str,
    "addr": int,
    "size": int,
    "stream": int,
    "time_us": int,
    "compile_context": str,
    "user_metadata": str,
}
ENTRY_MAY_HAVE = {"frames": list, "pool_id": tuple, "internal_metadata": str}
FRAME = {"name": str, "filename": str, "line": int}
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": str,
    "max_split_size": int,
    "garbage_collection_threshold": float,
    "expandable_segments": bool,
    "pinned_num_register_threads": int,
    "release_lock_on_cudamalloc": bool,
    "pinned_use_cuda_host_register": bool,
    "graph_capture_record_stream_reuse": bool,
    "roundup_power2_divisions": dict,
}
SETTINGS_MAY_HAVE = {"max_round_threshold": int, "max_cached_size": int}
ACTIONS = {
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "annotate",
}


def check_keys(what: dict[str, Any], must: dict[str, type], may: dict[str, type]) -> None:
    assert set(must) <= set(what) <= set(must) | set(may), sorted(set(what) ^ set(must))
    for key, kind in (must | may).items():
        assert key not in what or type(what[key]) is kind, (key, what[key])


def check_frames(frames: list[dict[str, Any]]) -> None:
    for frame in frames:
        for key, kind in FRAME.items():
            assert type(frame[key]) is kind, frame


def check_schema(snapshot: dict[str, Any]) -> None:
    """Every key and type is torch's, blocks tile their segments, and the sums are right."""
    assert {"segments", "device_traces", "allocator_settings", "external_annotations"} <= set(
        snapshot
    )
    check_keys(snapshot["allocator_settings"], SETTINGS, SETTINGS_MAY_HAVE)
    end = 0
    device = -1
    for segment in snapshot["segments"]:
        check_keys(segment, SEGMENT, {})
        check_frames(segment["frames"])
        assert segment["segment_type"] in ("small", "large")
        if segment["device"] != device:
            device, end = segment["device"], 0
        assert segment["address"] >= end, "segments overlap, or are not in order"
        at = segment["address"]
        for block in segment["blocks"]:
            check_keys(block, BLOCK, {})
            check_frames(block["frames"])
            assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
            assert block["address"] == at
            at += block["size"]
        end = at
        assert at == segment["address"] + segment["total_size"]
        active = [b for b in segment["blocks"] if b["state"] != "inactive"]
        allocated = [b for b in active if b["state"] == "active_allocated"]
        assert segment["active_size"] == sum(b["size"] for b in active)
        assert segment["requested_size"] == sum(b["requested_size"] for b in active)
        assert segment["allocated_size"] == sum(b["size"] for b in allocated)
    for trace in snapshot["device_traces"]:
        before = 0
        for entry in trace:
            assert entry["action"] in ACTIONS
            where = "device_free" if entry["action"] == "oom" else "addr"
            check_keys({**entry, "addr": entry[where]}, ENTRY, {**ENTRY_MAY_HAVE, where: int})
            check_frames(entry.get("frames", []))
            assert entry["time_us"] >= before, "entries are not in order of time"
            before = entry["time_us"]
    for mark in snapshot["external_annotations"]:
        assert type(mark["device"]) is type(mark["time_us"]) is int


def pages_by_trace(trace: list[dict[str, Any]]) -> dict[int, int]:
    """Follow the segment entries of a trace; return the stream of each page that is left."""
    pages: dict[int, int] = {}
    for entry in trace:
        kind = entry["action"]
        if not kind.startswith("segment_"):
            continue
        assert entry["size"] > 0
        for page in range(entry["addr"], entry["addr"] + entry["size"], PAGE):
            if kind in ("segment_map", "segment_alloc"):
                assert page not in pages, f"{kind} of a page that has memory"
                pages[page] = entry["stream"]
            else:
                assert pages.pop(page) == entry["stream"], f"{kind} of another stream's page"
    return pages


def pages_by_segments(segments: list[dict[str, Any]], device: int) -> dict[int, int]:
    return {
        page: segment["stream"]
        for segment in segments
        if segment["device"] == device
        for page in range(segment["address"], segment["address"] + segment["total_size"], PAGE)
    }


def blocks_by_trace(trace: list[dict[str, Any]]) -> tuple[dict[int, int], dict[int, int]]:
    """Follow the block entries; return the sizes of live and of pending blocks, by address."""
    live: dict[int, int] = {}
    pending: dict[int, int] = {}
    for entry in trace:
        address = entry.get("addr", 0)
        if entry["action"] == "alloc":
            assert address not in live
            assert address not in pending
            live[address] = entry["size"]
        elif entry["action"] == "free_requested":
            pending[address] = live.pop(address)
            assert pending[address] == entry["size"]
        elif entry["action"] == "free_completed":
            assert pending.pop(address) == entry["size"]
    return live, pending


def check_story(snapshot: dict[str, Any]) -> None:
    """The traces, recorded from the first allocation on, lead to the segments and their blocks."""
    for device, trace in enumerate(snapshot["device_traces"]):
        mine = [s for s in snapshot["segments"] if s["device"] == device]
        assert pages_by_trace(trace) == pages_by_segments(mine, device)
        live, pending = blocks_by_trace(trace)
        blocks = [b for s in mine for b in s["blocks"]]
        for state, expected in (("active_allocated", live), ("active_pending_free", pending)):
            found = {b["address"]: b["requested_size"] for b in blocks if b["state"] == state}
            assert found == expected, state


def names(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["name"] for frame in frames]
