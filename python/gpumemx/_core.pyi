# SPDX-License-Identifier: BSD-3-Clause
# Kept by hand, so that a change of the module is seen in a diff; tests/python/test_stubs.py holds
# the two together.
from collections.abc import Callable
from typing import TypedDict, final

import numpy as np
from numpy.typing import NDArray

__version__: str

class _Report(TypedDict):
    events: int
    live_peak_bytes: int
    reserved_peak_bytes: int
    driver_calls: dict[str, int]
    driver_seconds: float
    driver_seconds_inline: float
    driver_seconds_growth: float
    trace_seconds: float
    wait_seconds: float
    host_ns_per_event: float
    failed_at: int | None
    retries: int
    paths: dict[str, int]

class _Setting(TypedDict):
    key: str
    value: str
    source: str
    note: str

class _DeviceFacts(TypedDict):
    virtual_memory: bool
    exportable: bool
    granularity: int
    free: int
    total: int

class _Recording(TypedDict):
    state: str
    overflowed: bool
    baseline_bytes: int
    unknown_frees: int

class _Peak(TypedDict):
    event: int
    time_us: int | None
    live: int
    reserved: int | None

class _Site(TypedDict):
    site: str
    bytes: int
    count: int

_SizeClass = TypedDict("_SizeClass", {"class": str, "bytes": int, "count": int})

class _Category(TypedDict):
    category: str
    bytes: int
    count: int

class _AliveAtPeak(TypedDict):
    by_site: list[_Site]
    by_size_class: list[_SizeClass]
    by_category: list[_Category]

class _LonelySegment(TypedDict):
    address: int
    size: int
    held_by: str
    bytes: int

class _Fragmentation(TypedDict):
    reserved: int
    live: int
    largest_free: int
    free_in_busy_segments: int
    lonely_segments: list[_LonelySegment]

class _OutOfMemory(TypedDict):
    event: int
    requested: int
    device_free: int | None
    live: int
    reserved: int | None
    meaning: str

class _Series(TypedDict):
    time_us: list[int]
    live: list[int]
    reserved: list[int | None]

class _SnapshotDevice(TypedDict):
    device: int
    events: int
    recording: _Recording
    live_now: int
    reserved_now: int | None
    peak: _Peak
    alive_at_peak: _AliveAtPeak
    fragmentation: _Fragmentation
    ooms: list[_OutOfMemory]
    series: _Series

class _Snapshot(TypedDict):
    file: str
    schema: str
    devices: list[_SnapshotDevice]

class _SnapshotTrace(TypedDict):
    device: int
    op: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int16]
    time_us: NDArray[np.int64]
    slots: int

def gather_settings(conf: str, arguments: dict[str, str]) -> list[_Setting]: ...
def unknown_environment(names: list[str]) -> list[str]: ...
def probe_device(device: int) -> _DeviceFacts: ...
def build_info() -> dict[str, str | bool | None]: ...
def parse_bytes(text: str) -> int: ...
def format_bytes(size: int) -> str: ...
def validate_trace(
    op: NDArray[np.int64],
    size: NDArray[np.int64],
    stream: NDArray[np.int16],
    time_us: NDArray[np.int64],
    slots: int,
) -> str | None: ...
def analyze_snapshot(
    path: str | bytes, progress_callback: Callable[[int, int], object] | None = None
) -> _Snapshot: ...
def policies() -> list[str]: ...
def policy_settings(policy: str) -> list[str]: ...
def snapshot_traces(path: str) -> list[_SnapshotTrace]: ...
@final
class Replay:
    def __init__(
        self,
        op: NDArray[np.int64],
        size: NDArray[np.int64],
        stream: NDArray[np.int16],
        time_us: NDArray[np.int64],
        slots: int,
        *,
        capacity: int | None = None,
        lag_ms: float = 20.0,
        policy: str = "gpumemx",
        settings: dict[str, str] = {},
        device_bytes: int | None = None,
        device_total_bytes: int | None = None,
        record_segments: bool = False,
    ) -> None: ...
    def run(self, max_events: int | None = None) -> int: ...
    def report(self) -> _Report: ...
    @property
    def finished(self) -> bool: ...
    @property
    def failed_at(self) -> int | None: ...
    @property
    def events_done(self) -> int: ...
    @property
    def events_total(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def segments(self) -> NDArray[np.int64]: ...
