# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots as Python itself writes them: the extension's reader, and traces for the replay.

Case A36 (a snapshot that cannot be opened) and the snapshot part of case A37 (one of a program that
has not started CUDA). The reader's own tests are in tests/unit/replay.
"""

import io
import lzma
import os
import pickle
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpumemx
import numpy as np
import pytest
from gpumemx import _core

Snapshot = dict[str, Any]
BASE = 0x7F00_0000_0000
MIB = 1 << 20
RECORDED = {
    "bert_finetune": {
        "segments": 259,
        "reserved": 11_079_254_016,
        "allocations": 6604,
        "peak": 10_269_204_188,
    },
    "gnn_sampling": {
        "segments": 27,
        "reserved": 7_038_042_112,
        "allocations": 250,
        "peak": 5_261_699_720,
    },
}


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> Path:
    """One of two snapshots of torch 2.11 on an H200."""
    data = root / "tests" / "data"
    plain = data / f"{request.param}.pickle"
    if plain.exists():
        return plain
    unpacked = tmp_path / plain.name
    unpacked.write_bytes(lzma.decompress((data / f"{plain.name}.xz").read_bytes()))
    return unpacked


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def small(**changed: Any) -> Snapshot:
    """Return one of the newest schema: a block from before the recording, and one that is new."""
    frames = [
        frame("/x/site-packages/torch/nn/modules/module.py", 5, "_call_impl"),
        frame("a.py", 1, "f"),
    ]
    state = {"address": BASE, "size": 1024, "requested_size": 1000, "state": "active_allocated"}
    common = {"stream": 0, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    return {
        "segments": [
            {
                "device": 0,
                "address": BASE,
                "total_size": 2 * MIB,
                "allocated_size": 1536,
                "active_size": 1536,
                "requested_size": 1500,
                "stream": 0,
                "segment_type": "small",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [
                    {**state, "frames": frames},
                    {
                        **state,
                        "address": BASE + 1024,
                        "size": 512,
                        "requested_size": 500,
                        "frames": frames,
                    },
                    {
                        **state,
                        "address": BASE + 1536,
                        "size": 2 * MIB - 1536,
                        "requested_size": 0,
                        "state": "inactive",
                        "frames": [],
                    },
                ],
            }
        ],
        "device_traces": [
            [
                {
                    **common,
                    "action": "alloc",
                    "addr": BASE + 1024,
                    "size": 500,
                    "time_us": 1_700_000_000_000_000,
                    "frames": frames,
                },
                {
                    **common,
                    "action": "snapshot",
                    "addr": 0,
                    "size": 0,
                    "time_us": 1_700_000_000_000_009,
                },
            ]
        ],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 0},
        },
        "external_annotations": [{"stage": "START", "name": "step", "device": 0, "time_us": 5}],
        **changed,
    }


def written(path: Path, content: Any, protocol: int = 4) -> str:
    path.write_bytes(pickle.dumps(content, protocol))
    return str(path)


def in_python(content: Any, protocol: int) -> bytes:
    """Pickle with the implementation in Python, which writes other operations than that in C."""
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(content)  # type: ignore[attr-defined]
    return file.getvalue()


def replayed_by_hand(snapshot: Snapshot) -> tuple[int, int, Counter[str]]:
    """Return peak, its event and the bytes alive then by innermost frame, the slow way."""
    live: dict[int, dict[str, Any]] = {}
    now, peak, at, alive = 0, 0, -1, list[dict[str, Any]]()
    for i, entry in enumerate(snapshot["device_traces"][0]):
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
            now += entry["size"]
            if now > peak:
                peak, at, alive = now, i, list(live.values())
        elif entry["action"] == "free_requested":
            now -= live.pop(entry["addr"])["size"]
    sites: Counter[str] = Counter()
    for entry in alive:
        own = [
            f
            for f in entry["frames"]
            if not f["filename"].startswith(("site-packages/torch/", "<"))
        ]
        for f in own[:1]:
            sites[f"{f['filename']}:{f['line']} {f['name']}"] += entry["size"]
    return peak, at, sites


def test_a36_a_recorded_snapshot_is_read_to_the_byte(recorded: Path) -> None:
    expected = RECORDED[recorded.stem]
    with recorded.open("rb") as file:
        snapshot = pickle.load(file)
    assert len(snapshot["segments"]) == expected["segments"]
    found = _core.analyze_snapshot(str(recorded))
    assert found["file"] == str(recorded)
    (device,) = found["devices"]
    assert device["events"] == len(snapshot["device_traces"][0])
    assert device["reserved_now"] == expected["reserved"]
    assert device["live_now"] == sum(s["requested_size"] for s in snapshot["segments"])
    assert device["recording"] == {
        "state": "on",
        "overflowed": False,
        "baseline_bytes": 0,
        "unknown_frees": 0,
    }
    peak, at, sites = replayed_by_hand(snapshot)
    assert (device["peak"]["live"], device["peak"]["event"]) == (peak, at)
    assert peak == expected["peak"]
    assert device["peak"]["time_us"] == snapshot["device_traces"][0][at]["time_us"]
    by_site = {s["site"]: s["bytes"] for s in device["alive_at_peak"]["by_site"]}
    assert {site: by_site.get(site) for site in sites} == dict(sites)
    for groups in device["alive_at_peak"].values():
        assert sum(group["bytes"] for group in groups) == peak
    series = device["series"]
    assert max(series["live"]) == peak
    assert len(series["time_us"]) == len(series["live"]) == len(series["reserved"]) <= 4000


def test_a_recorded_snapshot_is_replayed(recorded: Path) -> None:
    trace = gpumemx.load_trace(recorded)
    expected = RECORDED[recorded.stem]
    assert (trace.op >= 0).sum() == expected["allocations"]
    assert [getattr(trace, name).dtype for name in ("op", "size", "stream", "time_us")] == [
        np.int64,
        np.int64,
        np.int16,
        np.int64,
    ]
    assert not trace.op.flags.writeable
    result = gpumemx.replay(recorded)
    assert result.live_peak_bytes == expected["peak"]
    assert result.file == str(recorded)
    assert result.reserved_peak_bytes < expected["reserved"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dumps", [pickle.dumps, in_python])
def test_a36_every_protocol_is_read(
    protocol: int, dumps: Callable[[Any, int], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(dumps(small(), protocol))
    (device,) = _core.analyze_snapshot(str(path))["devices"]
    assert device["recording"] == {
        "state": "on",
        "overflowed": False,
        "baseline_bytes": 1000,
        "unknown_frees": 0,
    }
    assert device["peak"] == {
        "event": 0,
        "time_us": 1_700_000_000_000_000,
        "live": 1500,
        "reserved": 2 * MIB,
    }
    assert device["alive_at_peak"]["by_site"] == [{"site": "a.py:1 f", "bytes": 1500, "count": 2}]
    assert device["live_now"] == 1500
    (trace,) = _core.snapshot_traces(str(path))
    assert trace["size"].tolist() == [1000, 500]


def as_torch(content: Any) -> bytes:
    """Pickle as torch does itself: protocol 2, all items of a list at once, memo by number."""
    memo: dict[Any, int] = {}

    def value(item: Any) -> bytes:
        key = item if isinstance(item, str) else id(item)
        if key in memo:
            return b"j" + struct.pack("<I", memo[key])
        if item is None or isinstance(item, (bool, int, float)):
            return pickle.dumps(item, 2)[2:-1]
        if isinstance(item, tuple):
            return b"(" + b"".join(map(value, item)) + b"t"
        if isinstance(item, str):
            memo[key] = len(memo)
            text = item.encode()
            return b"X" + struct.pack("<I", len(text)) + text + b"r" + struct.pack("<I", memo[key])
        memo[key] = len(memo)
        put = b"r" + struct.pack("<I", memo[key])
        if isinstance(item, list):
            return b"]" + put + b"(" + b"".join(map(value, item)) + b"e"
        pairs = b"".join(value(k) + value(v) for k, v in item.items())
        return b"}" + put + b"(" + pairs + b"u"

    return b"\x80\x02" + value(content) + b"."


def test_a36_what_torch_writes_itself_says_the_same(recorded: Path, tmp_path: Path) -> None:
    with recorded.open("rb") as file:
        snapshot = pickle.load(file)
    path = tmp_path / recorded.name
    path.write_bytes(as_torch(snapshot))
    with path.open("rb") as file:
        assert pickle.load(file) == snapshot
    again = _core.analyze_snapshot(str(path))
    assert {**again, "file": str(recorded)} == _core.analyze_snapshot(str(recorded))


# name: what an older torch, or a program that keeps only a part, does not write
OLDER: dict[str, Callable[[Snapshot], Any]] = {
    "without_pools": lambda s: _without(s, entry=("pool_id",)),
    "without_metadata": lambda s: _without(s, entry=("pool_id", "user_metadata")),
    "without_contexts": lambda s: _without(
        s, entry=("pool_id", "user_metadata", "compile_context")
    ),
    "without_annotations": lambda s: _without(s, top=("external_annotations",)),
    "torch_2_1": lambda s: _without(
        s,
        top=("external_annotations", "allocator_settings"),
        entry=("pool_id", "user_metadata", "compile_context", "time_us"),
        segment=("is_expandable", "segment_pool_id", "frames"),
    ),
    "torch_2_0": lambda s: _torch_2_0(s),
}


def _without(
    snapshot: Snapshot,
    *,
    top: tuple[str, ...] = (),
    entry: tuple[str, ...] = (),
    segment: tuple[str, ...] = (),
) -> Snapshot:
    for key in top:
        del snapshot[key]
    for one in snapshot["device_traces"][0]:
        for key in entry:
            del one[key]
    for one in snapshot["segments"]:
        for key in segment:
            del one[key]
    return snapshot


def _torch_2_0(snapshot: Snapshot) -> Snapshot:
    snapshot = OLDER["torch_2_1"](snapshot)
    for one in snapshot["segments"]:
        del one["requested_size"]
        for block in one["blocks"]:
            del block["address"]
            size, frames = block.pop("requested_size"), block.pop("frames")
            if block["state"] != "inactive":
                block["history"] = [{"addr": BASE, "real_size": size, "frames": frames}]
    return snapshot


@pytest.mark.parametrize("schema", OLDER)
def test_a36_every_schema_is_read(schema: str, tmp_path: Path) -> None:
    path = written(tmp_path / "old.pickle", OLDER[schema](small()))
    found = _core.analyze_snapshot(path)
    (device,) = found["devices"]
    assert found["schema"].startswith(
        "torch 2.0" if schema == "torch_2_0" else "torch 2.1 or newer"
    )
    assert device["recording"]["baseline_bytes"] == 1000
    assert device["peak"]["live"] == device["live_now"] == 1500
    assert device["peak"]["time_us"] == (None if "torch_2" in schema else 1_700_000_000_000_000)
    assert device["alive_at_peak"]["by_site"][0]["site"] == "a.py:1 f"
    assert len(_core.snapshot_traces(path)) == 1


def test_a36_a_bare_list_of_segments_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "list.pickle", small()["segments"])
    found = _core.analyze_snapshot(path)
    (device,) = found["devices"]
    assert found["schema"] == "segments only (torch.cuda.memory.memory_snapshot())"
    assert device["recording"]["state"] == "state only"  # its blocks have frames
    assert (device["events"], device["live_now"], device["reserved_now"]) == (0, 1500, 2 * MIB)
    assert device["peak"]["event"] == -1
    assert device["series"] == {"time_us": [], "live": [], "reserved": []}
    with pytest.raises(gpumemx.TraceError, match="no history: only the state was recorded"):
        gpumemx.load_trace(path)


def test_a36_no_history_is_said(tmp_path: Path) -> None:
    quiet = small(device_traces=[[]])
    for block in quiet["segments"][0]["blocks"]:
        block["frames"] = []
    path = written(tmp_path / "quiet.pickle", quiet)
    assert _core.analyze_snapshot(path)["devices"][0]["recording"]["state"] == "off"
    with pytest.raises(
        gpumemx.TraceError, match=r"no history: recording was off; call torch\.cuda\."
    ):
        gpumemx.load_trace(path)


@pytest.mark.parametrize(
    "empty",
    [{"segments": [], "device_traces": []}, {"segments": [], "device_traces": [[], []]}, []],
)
def test_a37_a_program_that_has_not_started_cuda_has_an_empty_snapshot(
    empty: object, tmp_path: Path
) -> None:
    path = written(tmp_path / "early.pickle", empty)
    with pytest.raises(
        ValueError, match="the snapshot is empty: no segments and no history; take it"
    ):
        _core.analyze_snapshot(path)
    with pytest.raises(gpumemx.TraceError, match="no history: recording was off"):
        gpumemx.load_trace(path)


def test_a37_reading_imports_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "small.pickle", small())
    code = "import sys; from gpumemx import _core; _core.analyze_snapshot(sys.argv[1]); "
    code += "import gpumemx; gpumemx.load_trace(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_the_device_with_the_most_events_is_replayed_unless_told(tmp_path: Path) -> None:
    one, two = small()["device_traces"][0], small()["device_traces"][0]
    more = {"action": "alloc", "size": 7, "stream": 1, "time_us": two[0]["time_us"]}
    two += [{**more, "addr": BASE + 8192}, {**more, "addr": BASE + 16384}]
    path = written(tmp_path / "two.pickle", small(device_traces=[one, [], two]))
    trace = gpumemx.load_trace(path)
    assert (len(trace), trace.path) == (3, f"{path} (device 2)")
    assert len(gpumemx.load_trace(path, device=0)) == 2  # with what was there before
    with pytest.raises(gpumemx.TraceError, match="no history of device 1; there is one of 0, 2"):
        gpumemx.load_trace(path, device=1)


def test_a_snapshot_is_known_by_its_content_or_its_name(tmp_path: Path) -> None:
    path = written(tmp_path / "snapshot.bin", small())
    assert len(gpumemx.load_trace(path)) == 2
    (tmp_path / "no.PKL").write_text("hello")
    with pytest.raises(gpumemx.TraceError, match="not a pickle of protocol 2 to 5"):
        gpumemx.load_trace(tmp_path / "no.PKL")


class _Runs:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def _cut(share: float) -> bytes:
    whole = pickle.dumps(small(), 4)
    return whole[: int(len(whole) * share)]


# name: (content, what its line must contain)
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "cut_start": (_cut(0.01), "truncated: what starts at byte"),
    "cut_half": (_cut(0.5), "truncated: what starts at byte"),
    "cut_end": (_cut(0.999), "truncated: what starts at byte"),
    "text": (b"hello", "not a pickle of protocol 2 to 5"),
    "json": (b'{"segments": []}', "it looks like JSON"),
    "zip": (b"PK\x03\x04", "it looks like an archive"),
    "protocol_0": (pickle.dumps(small(), 0), "it may be one of protocol 0 or 1"),
    "code": (pickle.dumps(_Runs(os.system, ("touch x",)), 4), "it asks for code: 'posix.system'"),
    "code_2": (pickle.dumps(_Runs(os.system, ("touch x",)), 2), "it asks for code: 'posix.system'"),
    "array": (pickle.dumps(np.zeros(3), 4), "it asks for code: 'numpy"),
    "set": (
        pickle.dumps({"segments", "device_traces"}, 4),
        "segments[0] is a str that is no segment",
    ),
    "number": (pickle.dumps(5, 4), "not a memory snapshot: it is an int, not a dict"),
    "weights": (pickle.dumps({"model": [1.0]}, 4), "it has neither 'segments' nor 'device_traces'"),
    "wrong_traces": (pickle.dumps(small(device_traces=3), 4), "'device_traces' is an int"),
    "wrong_entry": (pickle.dumps(small(device_traces=[[5]]), 4), "device_traces[0][0] is an int"),
    "wrong_size": (
        pickle.dumps(small(device_traces=[[{"action": "alloc", "addr": 1, "size": "x"}]]), 4),
        "a trace entry: 'size' is a str, not an int (byte ",
    ),
    "huge_size": (
        pickle.dumps(small(device_traces=[[{"action": "alloc", "addr": 1, "size": 2**70}]]), 4),
        "a trace entry: 'size' is an int of more than 64 bits, not an int",
    ),
    "huge_length": (b"\x80\x04\x8d" + b"\xff" * 8 + b"x.", "truncated: what starts at byte 2"),
    "deep": (b"\x80\x04" + b"]" * 10**6 + b"a" * (10**6 - 1) + b".", "segments[0] is a list"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a36_a_bad_file_is_one_clear_line(kind: str, tmp_path: Path) -> None:
    content, text = BAD[kind]
    path = tmp_path / f"{kind}.pickle"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the text is looked at below)
        _core.analyze_snapshot(str(path))
    said = str(caught.value)
    assert text in said
    assert len(said) < 300
    assert "\n" not in said
    with pytest.raises(gpumemx.TraceError) as refused:
        gpumemx.load_trace(path)
    assert str(refused.value) == f"{path}: {said}"


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^No such file or directory$"):
        _core.analyze_snapshot(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"^Is a directory$"):
        _core.analyze_snapshot(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"^not a regular file: copy it to one first$"):
        _core.analyze_snapshot(str(tmp_path / "pipe"))


def test_names_that_are_no_text_are_shown(tmp_path: Path) -> None:
    content = pickle.dumps(small(), 4).replace(b"a.py", b"\xff\xfe.p")
    (tmp_path / "odd.pickle").write_bytes(content)
    (device,) = _core.analyze_snapshot(str(tmp_path / "odd.pickle"))["devices"]
    assert device["alive_at_peak"]["by_site"][0]["site"] == r"\xff\xfe.p:1 f"


def test_a_random_run_from_any_point_on_has_the_same_figures(tmp_path: Path) -> None:
    """Without the events before a random one, the rest and the state tell the same live bytes."""
    random = np.random.default_rng(7)
    live: dict[int, int] = {}
    entries: list[dict[str, Any]] = []
    history = []
    for i in range(3000):
        if live and random.random() < 0.48:
            addr = list(live)[random.integers(len(live))]
            size = live.pop(addr)
            entries.append({"action": "free_requested", "addr": addr, "size": size, "time_us": i})
            history.append(sum(live.values()))
            entries.append({"action": "free_completed", "addr": addr, "size": size, "time_us": i})
        else:
            addr = BASE + 512 * next(k for k in range(4000) if BASE + 512 * k not in live)
            live[addr] = size = int(random.integers(1, 512))
            entries.append({"action": "alloc", "addr": addr, "size": size, "time_us": i})
        history.append(sum(live.values()))
    blocks = [
        {"address": a, "size": 512, "requested_size": s, "state": "active_allocated"}
        for a, s in sorted(live.items())
    ]
    segment = {"device": 0, "address": BASE, "total_size": 4 * MIB, "stream": 0, "blocks": blocks}
    for cut in [0, *random.integers(1, len(entries) - 2, 30).tolist()]:
        kept = small(segments=[segment], device_traces=[entries[cut:]])
        (device,) = _core.analyze_snapshot(written(tmp_path / "cut.pickle", kept))["devices"]
        before = history[cut - 1] if cut else 0
        assert device["recording"]["baseline_bytes"] == before
        assert device["live_now"] == history[-1]
        assert device["peak"]["live"] == max(before, *history[cut:])
        (trace,) = _core.snapshot_traces(str(tmp_path / "cut.pickle"))
        change = np.where(trace["op"] >= 0, trace["size"], -trace["size"])
        assert change.sum() == history[-1]
        assert np.cumsum(change).max() == device["peak"]["live"]


def test_the_progress_is_told_and_can_end_the_reading(tmp_path: Path, root: Path) -> None:
    big = _big_snapshot(tmp_path, root, 20_000_000)
    seen: list[tuple[int, int]] = []
    _core.analyze_snapshot(str(big), lambda done, total: seen.append((done, total)))
    size = big.stat().st_size
    assert len(seen) >= 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {size}
    assert seen[-1] == (size, size)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.analyze_snapshot(str(big), stop)


def _big_snapshot(folder: Path, root: Path, size: int) -> Path:
    path = folder / "big.pickle"
    subprocess.run(
        [
            sys.executable,
            root / "benchmarks" / "big_snapshot.py",
            path,
            "--size",
            f"{size // 1000}KB",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return path


def test_a36_a_large_file_takes_little_memory(tmp_path: Path, root: Path) -> None:
    """Twice its size at most, as of a file of 1 GB (1.2 GB)."""
    size = 40_000_000
    big = _big_snapshot(tmp_path, root, size)
    code = "import resource, sys; from gpumemx import _core; "
    code += "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = peak(); "
    code += "found = _core.analyze_snapshot(sys.argv[1])['devices'][0]; "
    code += "print(peak() - before, found['peak']['live'], found['events'])"
    done = subprocess.run(
        [sys.executable, "-c", code, big], capture_output=True, text=True, check=True
    )
    grown_kib, live, events = map(int, done.stdout.split())
    assert grown_kib * 1024 < 2 * size
    assert live == sum((1 << 20) + i * 4096 + 512 * (i % 7) for i in range(200))
    assert events > 200_000
