# SPDX-License-Identifier: BSD-3-Clause
"""The memory history, snapshots and observers on a device, through torch's own Python functions.

python -m pytest tests/gpu/test_history.py, with the built package on PYTHONPATH. Without a device
all of it is skipped; GPUMEMX_REQUIRE_GPU=1 makes that a failure. Where the answer is torch's own,
the same program runs on its allocator and on gpumemx, and the two must say the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "python"
sys.path.insert(0, str(TOOLS))

from torch_tools import program, require_device  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    require_device()


START = f"""
import itertools, json, pickle, sys, warnings
sys.path.insert(0, {str(TOOLS)!r})
from history_tools import *
import torch
MIB, GIB = 1 << 20, 1 << 30
def tensor(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
record = torch.cuda.memory._record_memory_history
def snapshot():
    s = torch.cuda.memory._snapshot()
    check_schema(s)
    return s
def entries(*actions):
    found = snapshot()["device_traces"][0]
    return [e for e in found if not actions or e["action"] in actions]
def tell(what):
    print("RESULT", json.dumps(what))
"""
INSTALL = "import gpumemx; gpumemx.install_allocator()\n"


def run(text: str, install: str, **environment: str) -> Any:
    done = program(install + START + text, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(results[-1]) if results else None


def on_gpumemx(text: str, **environment: str) -> Any:
    return run(text, INSTALL, **environment)


def on_both(text: str, **environment: str) -> tuple[Any, Any]:
    """What the program tells on torch's allocator, and on gpumemx."""
    return run(text, "", **environment), on_gpumemx(text, **environment)


COMBINATIONS = """
def one(enabled, context, stacks):
    record(None)
    torch.cuda.empty_cache()
    record(enabled, context=context, stacks=stacks, max_entries=1000)
    assert torch._C._cuda_isHistoryEnabled()
    def here():
        return tensor(3 * MIB)
    def there(held):
        held.clear()
    held = [here()]
    kept = here()
    there(held)
    s = snapshot()
    (live,) = [b for g in s["segments"] for b in g["blocks"]
               if b["address"] == kept.untyped_storage().data_ptr()]
    assert live["state"] == "active_allocated"
    assert ("here" in names(live["frames"])) == (context is not None), (enabled, context)
    cpp = [f for f in live["frames"] if "::" in f["name"] or ".so" in f["filename"]]
    assert bool(cpp) == (stacks == "all" and context is not None), live["frames"]
    trace = s["device_traces"][0]
    if enabled == "state":
        assert len(trace) <= 1, trace
    else:
        assert {"alloc", "free_requested", "free_completed"} <= {e["action"] for e in trace}
    for e in trace:
        if e["action"] == "alloc":
            assert ("frames" in e) == (context in ("alloc", "all")), (context, e)
            assert "frames" not in e or "here" in names(e["frames"])
        if e["action"] == "free_requested" and "frames" in e:
            assert ("there" if context == "all" else "here") in names(e["frames"]), e
    return [len([e for e in trace if e["action"] == a])
            for a in ("alloc", "free_requested", "free_completed")]
found = [one(*arguments) for arguments in itertools.product(
    ("state", "all"), (None, "state", "alloc", "all"), STACKS)]
record(None)
assert not torch._C._cuda_isHistoryEnabled()
assert snapshot()["device_traces"][0] == []
tell(found)
"""


@pytest.mark.parametrize("stacks", ["python", "all"])
def test_every_combination_of_arguments(stacks: str) -> None:
    native, ours = on_both(f"STACKS = ({stacks!r},)\n" + COMBINATIONS)
    assert ours == native


def test_the_old_form_of_the_arguments() -> None:
    native, ours = on_both(
        """
record(True, record_context=True, trace_alloc_max_entries=100, trace_alloc_record_context=True)
a = tensor(3 * MIB)
del a
tell([(e["action"], e["size"], "frames" in e)
      for e in entries("alloc", "free_requested", "free_completed")])
record(False)
"""
    )
    assert ours == native
    assert len(ours) == 3


def test_rings_and_rules() -> None:
    native, ours = on_both(
        """
skipped = ["segment_alloc", "segment_map", "snapshot"]
record(max_entries=4, skip_actions=skipped)
for _ in range(5): tensor(1000)
first = [e["action"] for e in entries()]
record(max_entries=100, clear_history=True, skip_actions=skipped + ["free_requested"])
for _ in range(2): tensor(1000)
second = [e["action"] for e in entries()]
record(max_entries=100, skip_actions=skipped)          # what is there stays
third = [e["action"] for e in entries()]
try:
    record(skip_actions=["free_requestet"])
    wrong = "passed"
except Exception as error:
    wrong = type(error).__name__
tell([first, second, third, wrong])
"""
    )
    assert ours[:3] == native[:3]


def test_the_trace_leads_to_the_segments() -> None:
    on_gpumemx(
        """
import random
record(context=None)
pick = random.Random(5)
streams = [torch.cuda.Stream() for _ in range(3)]
held = []
for i in range(3000):
    with torch.cuda.stream(pick.choice(streams)):
        held.append(tensor(pick.choice((512, 5000, MIB, 3 * MIB, 33 * MIB, 20 * MIB + 7))))
    if pick.random() < 0.2:
        held[-1].record_stream(pick.choice(streams))
    if len(held) > 30:
        held.pop(pick.randrange(len(held)))
    if i % 500 == 0:
        check_story(snapshot())
    if i % 1000 == 999:
        torch.cuda.empty_cache()
check_story(snapshot())
s, stats = snapshot(), torch.cuda.memory_stats()
for key, name in (("allocated_size", "allocated_bytes"), ("active_size", "active_bytes"),
                  ("requested_size", "requested_bytes")):
    assert sum(g[key] for g in s["segments"]) == stats[f"{name}.all.current"], name
"""
    )


def test_the_same_keys_and_types_as_torchs_own() -> None:
    native, ours = on_both(
        """
record()
with torch.profiler.record_function("mark"):
    kept = [tensor(30 * MIB), tensor(700)]
    del kept[0]
def shape(x):
    if isinstance(x, dict):
        return {str(k): shape(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [type(x).__name__] + ([shape(x[0])] if x else [])
    return type(x).__name__
s = snapshot()
blocks = [b for g in s["segments"] for b in g["blocks"] if b["frames"]]
by_action = {e["action"]: shape(e) for e in s["device_traces"][0]}
tell({
    "top": sorted(s), "settings": shape(s["allocator_settings"]),
    "segment": sorted((k, type(v).__name__) for k, v in s["segments"][0].items()),
    "block": shape(blocks[0]), "mark": shape(s["external_annotations"][0]),
    **{a: by_action[a] for a in ("alloc", "free_requested", "free_completed")},
})
"""
    )
    assert ours == native


def test_out_of_memory_is_recorded_before_the_observers_are_called() -> None:
    ours = on_gpumemx(
        """
record()
told = []
def observer(device, size, total, free):
    torch.cuda.memory._dump_snapshot("/dev/null")
    told.append((device, size, total, free, len(entries("oom"))))
torch._C._cuda_attach_out_of_memory_observer(observer)
total = torch.cuda.get_device_properties(0).total_memory
kept = tensor(GIB)
def greedy():
    return tensor(total)
try:
    greedy()
except torch.OutOfMemoryError as error:
    told.append("Tried to allocate" in str(error))
(e,) = entries("oom")
assert "greedy" in names(e["frames"])
assert e["size"] >= total
tell([told[0][0], told[0][1] >= total, told[0][3] == e["device_free"], told[0][4], told[1]])
"""
    )
    assert ours == [0, True, True, 1, True]


def test_contexts_of_compiled_code() -> None:
    native, ours = on_both(
        """
record(compile_context=True, max_entries=10000)
@torch.compile(backend="eager")
def f(x): return (x + 1) * 2
f(torch.ones(1000, 1000, device="cuda"))
tell(sorted({e["compile_context"] for e in entries("alloc")}))
"""
    )
    assert ours == native


def test_marks_metadata_and_annotations() -> None:
    native, ours = on_both(
        """
record()
say = getattr(torch.cuda.memory, "_set_memory_metadata", None) or torch._C._cuda_setMemoryMetadata
with torch.profiler.record_function("step"):
    say("weights")
    a = tensor(3 * MIB)
    say("")
if hasattr(torch.cuda.memory, "_annotate_tensor"):
    torch.cuda.memory._annotate_tensor(a[5:], "saved")
del a
s = snapshot()
marks = [(m["name"], m["stage"], m["device"]) for m in s["external_annotations"]]
said = [(e["action"], e["size"], e["user_metadata"]) for e in s["device_traces"][0]
        if not e["action"].startswith("segment")]
tell([marks, said])
"""
    )
    assert ours == native
    assert ["alloc", 3 << 20, "weights"] in ours[1]


def test_where_a_tensor_was_allocated() -> None:
    on_gpumemx(
        """
if hasattr(torch.cuda.memory, "_allocation_traceback"):
    where = torch.cuda.memory._allocation_traceback
    before = tensor(1000)
    record(context="state")
    def here(): return tensor(1000)
    a = here()
    assert where(before.data_ptr()) is None
    assert "here" in names(where(a.data_ptr()))
    assert where(a.data_ptr() + 512) is None
"""
    )


def test_a_block_in_use_by_another_stream_is_pending() -> None:
    on_gpumemx(
        """
record()
a = tensor(20 * MIB)
address = a.data_ptr()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    torch.cuda._sleep(2_000_000_000)
    a.record_stream(side)
del a
def state():
    return [b["state"] for g in snapshot()["segments"] for b in g["blocks"]
            if b["address"] == address]
assert state() == ["active_pending_free"], state()
assert entries("free_requested") and not entries("free_completed")
torch.cuda.synchronize()
tensor(512)                                # allocating looks whether it is done
assert entries("free_completed")
assert state() != ["active_pending_free"]
check_story(snapshot())
"""
    )


PROFILED = """
from torch.profiler import ProfilerActivity, profile, record_function
def work():
    with record_function("small"):
        a = [torch.zeros(n, device="cuda") for n in (1, 100, 5000, 100_000)]
    with record_function("large"):
        b = torch.ones(1024, 1024, device="cuda")          # 4 MiB
        c = torch.relu(b) + b * 2
        d = torch.ones(8 * 1024, 1024, device="cuda")      # 32 MiB
    with record_function("free"):
        del a, b, d
    return c
kept = work()
del kept
torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as prof:
    kept = work()
    torch.cuda.synchronize()
totals = sorted((e.key, e.self_device_memory_usage) for e in prof.key_averages()
                if e.self_device_memory_usage != 0)
"""


def test_the_profilers_totals_are_torchs() -> None:
    native, ours = on_both(PROFILED + "tell(totals)")
    assert native
    assert ours == native


def test_the_profilers_events_are_torchs() -> None:
    native, ours = on_both(
        PROFILED
        + """
from torch._C._profiler import _EventType
found = []
def visit(events):
    for e in events:
        if e.tag == _EventType.Allocation and e.extra_fields.device.type == "cuda":
            found.append((e.start_time_ns, e.extra_fields.alloc_size,
                          e.extra_fields.total_allocated))
        visit(e.children)
visit(prof.profiler.kineto_results.experimental_event_tree())
tell([event[1:] for event in sorted(found)])
"""
    )
    assert native
    assert ours == native


def test_trackers_attached_before_and_after_cuda_starts() -> None:
    ours = on_gpumemx(
        """
from gpumemx import _adapter
adapter = _adapter.load()
early = adapter._SimTracker()
assert not torch.cuda.is_initialized()
a = tensor(50 * MIB)
address = a.data_ptr()
late = adapter._SimTracker()
shown = [(g["address"], g["total_size"]) for g in torch.cuda.memory._snapshot()["segments"]]
del a
torch.cuda.empty_cache()
told = [e for e in early.take() if e["action"].startswith("segment")]
assert [(e["addr"], e["size"]) for e in told if e["action"] == "segment_alloc"] == shown
assert shown == [(address, 50 * MIB)]
tell([[e["action"] for e in told], [e["action"] for e in late.take()]])
""",
        GPUMEMX_CONF="mode:plain",
    )
    assert ours[0] == ["segment_alloc", "segment_free"]
    assert ours[1] == ["snapshot", "free_requested", "free_completed", "segment_free"]


def test_dumps_are_read_by_torchs_viewer(tmp_path: Path) -> None:
    file = tmp_path / "dump.pickle"
    on_gpumemx(
        f"""
from torch.cuda import _memory_viz as viz
record()
kept = [tensor(n) for n in (30 * MIB, 700, 5 * MIB, 3 * MIB + 1)]
del kept[1]
torch.cuda.memory._dump_snapshot({str(file)!r})
with open({str(file)!r}, "rb") as f:
    s = pickle.load(f)
check_schema(s)
check_story(s)
plain = lambda lines: lines
assert "active_allocated" in viz.segments(s, format_flamegraph=plain)
assert "active_allocated" in viz.memory(s, format_flamegraph=plain)
assert "total_reserved" in viz.segsum(s)
assert "segment_map" in viz.trace(s)
for html in (viz.trace_plot(s), viz.trace_plot(s, plot_segments=True), viz.segment_plot(s)):
    assert "MemoryViz.js" in html
viz.compare(s["segments"], s["segments"], format_flamegraph=plain)
if "filter_freed" in viz.trace_plot.__code__.co_varnames:
    viz.trace_plot(s, filter_freed=True)
"""
    )
    written = file.read_bytes()
    assert written[0] == 0x80  # PROTO
    if sys.version_info < (3, 14):  # where torch's pickle.dump() has another default
        assert written[1] == 4


def test_segments_alone_and_of_one_pool() -> None:
    on_gpumemx(
        """
record()
a = tensor(3 * MIB)
assert torch.cuda.memory_snapshot()
assert torch.cuda.memory_snapshot(include_traces=False)
assert torch.cuda.memory_snapshot((0, 12345)) == []
"""
    )


def test_the_sanitizer_sees_races_as_on_torchs_own() -> None:
    text = """
a = torch.rand(4, 2, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    torch.mul(a, 5, out=a)
"""
    for install in ("", INSTALL):
        done = program(install + START + text, TORCH_CUDA_SANITIZER="1")
        assert "possible data race" in done.stderr, (install, done.stderr)


PAIRS = """
import time
record(max_entries=100_000, stacks="python")
def pairs(count):
    begin = time.perf_counter()
    for _ in range(count):
        torch.empty(1000, device="cuda")
    return (time.perf_counter() - begin) / count
pairs(20_000)
tell(min(pairs(20_000) for _ in range(7)) * 1e6)
"""


def test_with_python_stacks_a_pair_is_no_slower_than_on_torchs_own() -> None:
    native, ours = on_both(PAIRS)
    print(f"an empty() and its end, with Python stacks: native {native:.2f} us, ours {ours:.2f} us")
    assert ours <= native * 1.1
