# SPDX-License-Identifier: BSD-3-Clause
"""The Python API of the replay and the extension under it."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import gpumemx
import numpy as np
import pytest
from conftest import arrays
from gpumemx import _core
from gpumemx.trace import Trace

MIB = 1 << 20
PAGE = 2 * MIB

# The peak of the sum of the sizes asked for, as numpy computes it from the file.
LIVE_PEAK = {
    "fsdp_streams": 7_354_146_824,
    "gnn_sampling": 25_435_869_096,
    "resnet152": 12_448_176_148,
}


def live_peak(trace: Trace) -> int:
    allocates = trace.op >= 0
    slot = np.where(allocates, trace.op, ~trace.op)
    change = np.where(allocates, trace.size, 0)
    held = np.zeros(trace.slots, np.int64)
    for i in range(len(trace)):
        if allocates[i]:
            held[slot[i]] = trace.size[i]
        else:
            change[i] = -held[slot[i]]
    return int(np.cumsum(change).max(initial=0))


def figures(result: gpumemx.ReplayResult) -> dict[str, object]:
    """Return everything that must not differ from run to run."""
    kept = dataclasses.asdict(result)
    del kept["host_ns_per_event"]
    return kept


def cut(trace: Trace, n: int) -> Trace:
    columns = {name: getattr(trace, name)[:n] for name in ("op", "size", "stream", "time_us")}
    return Trace(**columns, slots=trace.slots, path=trace.path)


def test_the_live_peak_is_that_of_the_file(shipped: Path) -> None:
    trace = gpumemx.load_trace(shipped)
    result = gpumemx.replay(trace)
    assert result.live_peak_bytes == live_peak(trace) == LIVE_PEAK[shipped.stem]


def test_a_shipped_trace_passes_and_adds_up(shipped: Path) -> None:
    result = gpumemx.replay(shipped)
    trace = gpumemx.load_trace(shipped)
    assert result.failed_at is None
    assert result.fits_in_bytes is None
    assert result.events == len(trace)
    assert 1.0 <= result.ratio <= 1.12
    assert result.reserved_peak_bytes % PAGE == 0
    assert result.trace_seconds == pytest.approx((trace.time_us[-1] - trace.time_us[0]) / 1e6)
    assert 0 < result.driver_seconds_growth <= result.driver_seconds_inline
    assert result.driver_seconds_inline <= result.driver_seconds
    assert result.driver_calls["map"] >= result.driver_calls["create"] > 0
    assert result.host_ns_per_event > 0
    assert result.paths["hits"] + result.paths["misses"] == (trace.op >= 0).sum()
    assert result.paths["waits"] == 0  # there is memory enough


def test_two_replays_give_the_same_figures(gnn: Path) -> None:
    assert figures(gpumemx.replay(gnn)) == figures(gpumemx.replay(gnn))


@pytest.mark.parametrize("n", [0, 1, 2, 777, 5000, 9160])
def test_a_cut_trace_gives_the_figures_of_the_prefix(gnn: Path, n: int) -> None:
    trace = gpumemx.load_trace(gnn)
    engine = _core.Replay(trace.op, trace.size, trace.stream, trace.time_us, trace.slots)
    assert engine.run(n) == engine.events_done == n
    prefix, whole = engine.report(), figures(gpumemx.replay(cut(trace, n)))
    del prefix["host_ns_per_event"]
    assert prefix == {name: whole[name] for name in prefix}


def test_too_little_memory_stops_at_the_event() -> None:
    trace = Trace(**{**arrays(), "slots": 2})
    result = gpumemx.replay(trace, capacity="95MiB")
    assert (result.failed_at, result.events, result.live_peak_bytes) == (1, 1, 32 * MIB)
    assert "out of memory at event 1" in str(result)
    assert gpumemx.replay(trace, capacity=96 * MIB).failed_at is None


def test_what_fits_is_the_smallest(shipped: Path) -> None:
    trace = gpumemx.load_trace(shipped)
    result = gpumemx.replay(trace, fit=True)
    fits_in = result.fits_in_bytes
    assert fits_in is not None
    assert result.live_peak_bytes <= fits_in
    assert gpumemx.replay(trace, capacity=fits_in).failed_at is None
    less = min(fits_in - PAGE, int(fits_in * 0.998))
    assert gpumemx.replay(trace, capacity=less).failed_at is not None


def test_what_fits_does_not_depend_on_the_capacity(root: Path) -> None:
    trace = gpumemx.load_trace(root / "examples" / "traces" / "resnet152.npz")
    free = gpumemx.replay(trace, fit=True)
    tight = gpumemx.replay(trace, fit=True, capacity="8GiB")
    assert tight.failed_at is not None
    assert tight.fits_in_bytes == free.fits_in_bytes


def test_a_trace_of_one_page_fits_in_one_page() -> None:
    made = arrays(op=np.array([0, ~0, 0, ~0], np.int64), size=np.full(4, 2 * MIB, np.int64))
    made["stream"] = np.zeros(4, np.int16)
    result = gpumemx.replay(Trace(**{**made, "slots": 1}), fit=True)
    assert result.fits_in_bytes == PAGE


def test_a_trace_without_events_needs_nothing() -> None:
    empty = {name: array[:0] for name, array in arrays().items() if name != "slots"}
    result = gpumemx.replay(Trace(**empty, slots=0))
    assert (result.events, result.live_peak_bytes, result.reserved_peak_bytes) == (0, 0, 0)
    assert np.isnan(result.ratio)


def test_a_request_that_no_device_holds_fits_nowhere() -> None:
    made = arrays(size=np.array([1, 2**62, 1, 1], np.int64))
    result = gpumemx.replay(Trace(**{**made, "slots": 2}), fit=True)
    assert result.failed_at == 1
    assert result.fits_in_bytes is None


def test_the_progress_reaches_the_end(shipped: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    result = gpumemx.replay(shipped, progress=lambda *step: seen.append(step))
    assert seen[-1] == ("replay", result.events, result.events)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize("capacity", [0, -1, 2**63, "lots", "-1GiB", ""])
def test_a_capacity_that_is_none_is_refused(good: Path, capacity: int | str) -> None:
    with pytest.raises(ValueError, match=r"capacity|size"):
        gpumemx.replay(good, capacity=capacity)


@pytest.mark.parametrize("lag", [-1.0, float("nan"), float("inf"), 1e7])
def test_a_lag_that_is_none_is_refused(good: Path, lag: float) -> None:
    with pytest.raises(ValueError, match="the lag must be from 0 to 3600000 milliseconds"):
        gpumemx.replay(good, lag_ms=lag)


def test_the_dictionary_has_the_documented_keys(good: Path) -> None:
    assert list(gpumemx.replay(good).to_dict()) == [
        "file",
        "policy",
        "events",
        "live_peak_bytes",
        "reserved_peak_bytes",
        "fits_in_bytes",
        "driver_calls",
        "driver_seconds",
        "driver_seconds_inline",
        "driver_seconds_growth",
        "trace_seconds",
        "host_ns_per_event",
        "failed_at",
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("1.5 gib", 3 << 29),
        ("512M", 512 << 20),
        ("2kB", 2048),
        ("1000000", 1_000_000),
        ("7b", 7),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert _core.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 GiBs", "1e3", "-1", "0x10", "nan", "8388608T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it like 24GiB"):
        _core.parse_bytes(text)


def test_sizes_are_written() -> None:
    sizes = (0, 1023, 1536, 5 << 30)
    assert [_core.format_bytes(n) for n in sizes] == ["0 B", "1023 B", "1.50 KiB", "5.00 GiB"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"op": np.zeros(4)}, "op must be a one-dimensional C-contiguous array of int64, not "),
        ({"size": np.zeros((2, 2), np.int64)}, "size must be .* not 2-dimensional of int64"),
        ({"stream": np.zeros(4, np.int64)}, "stream must be .* array of int16"),
        ({"time_us": np.zeros(8, np.int64)[::2]}, "time_us must be .* C-contiguous"),
        (
            {"op": np.zeros(33, np.int8)[1:].view(np.int64)},
            "op must be a one-dimensional C-contiguous array of int64",
        ),
        ({"op": [0, 1, 2, 3]}, "incompatible constructor arguments"),
    ],
)
def test_the_extension_converts_nothing(changed: dict[str, object], text: str) -> None:
    made = {**arrays(), "slots": 2, **changed}
    with pytest.raises(TypeError, match=text):
        _core.Replay(**made)


def test_the_extension_checks_the_trace() -> None:
    made = {**arrays(), "slots": 1}
    text = "event 1: slot 1 is out of range; slots is 1"
    assert _core.validate_trace(**made) == text
    with pytest.raises(ValueError, match=text):
        _core.Replay(**made)


def test_the_extension_keeps_the_arrays() -> None:
    made = {**arrays(), "slots": 2}
    # Not inside assert: pytest holds on to what it has there.
    before = sys.getrefcount(made["op"])
    engine = _core.Replay(**made)
    during = sys.getrefcount(made["op"])
    engine.run()
    del engine
    after = sys.getrefcount(made["op"])
    assert (during, after) == (before + 1, before)


def test_threads_may_share_a_replay(gnn: Path) -> None:
    trace = gpumemx.load_trace(gnn)
    engine = _core.Replay(trace.op, trace.size, trace.stream, trace.time_us, trace.slots)

    def work() -> None:
        while not engine.finished:
            engine.run(10)
            engine.report()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report, alone = engine.report(), figures(gpumemx.replay(trace))
    del report["host_ns_per_event"]
    assert report == {name: alone[name] for name in report}


def test_the_example_runs(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, root / "examples" / "replay_trace.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "with 95 % of the live peak: out of memory at event" in done.stdout
    assert done.stdout.splitlines()[2].startswith("fits in ")


def test_the_benchmark_runs(root: Path, good: Path) -> None:
    done = subprocess.run(
        [sys.executable, root / "benchmarks" / "replay_bench.py", good, "--runs", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[1].split()[:2] == ["good.npz", "4"]
