# SPDX-License-Identifier: BSD-3-Clause
"""The memory history through torch's own functions, over simulated devices."""

import ast
import pickle
import pickletools
from pathlib import Path

import pytest
from torch_tools import GIB, MIB, SIMULATED, program, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]

# What every program here starts with, after SIMULATED.
START = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from history_tools import *
record = adapter._sim_record_history
def snapshot():
    s = torch.cuda.memory._snapshot()
    check_schema(s)
    return s
def entries(device=0, *actions):
    found = snapshot()["device_traces"][device]
    return [e for e in found if not actions or e["action"] in actions]
"""


def values(text: str, **environment: str) -> list[object]:
    lines = simulated(START + text, **environment).splitlines()
    return [ast.literal_eval(line) for line in lines]


def test_the_trace_has_every_event_and_leads_to_the_segments() -> None:
    actions, other = values(
        """
record()
a, b = alloc(3 * MIB), alloc(1000)
adapter._sim_record_stream_id(0, a, 5)
free(a)                                # pending, until its other stream is done
free(b)
c = alloc(5 * MIB, device=1)
free(alloc(40 * MIB))
torch._C._accelerator_emptyCache()
kept = [alloc(n) for n in (30 * MIB, 700, 5 * MIB, 3 * MIB + 1)]
s = snapshot()
check_story(s)
print([e["action"] for e in s["device_traces"][0]][:5])
print([(e["action"], e["size"]) for e in s["device_traces"][1]])
"""
    )
    # The small block stands in what the first one left over.
    assert actions == ["segment_map", "alloc", "alloc", "free_requested", "free_requested"]
    assert isinstance(other, list)
    assert other[0][0] == "segment_map"
    assert other[1] == ("alloc", 5 * MIB)


def test_random_work_of_several_threads_tells_one_story() -> None:
    values(
        """
import random, threading, time
record(context=None)
errors = []
def work(seed):
    try:
        pick = random.Random(seed)
        held = []
        for _ in range(1500):
            held.append(alloc(pick.choice((512, 5000, MIB, 3 * MIB, 33 * MIB)), device=seed % 2,
                              stream=1 + 2 * (seed % 3)))
            if len(held) > 6:
                free(held.pop(pick.randrange(len(held))))
        for address in held[::2]:
            free(address)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
for t in threads: t.start()
while any(t.is_alive() for t in threads):
    check_story(snapshot())
    time.sleep(0.05)  # the workers need the interpreter's lock at every call
for t in threads: t.join()
assert not errors, errors
check_story(snapshot())
"""
    )


COMBINATIONS = """
import itertools
def one(enabled, context, stacks):
    record(None)
    adapter.clear_cache(0)  # at once; what is called in every step is only marked
    record(enabled, context, stacks, max_entries=1000)
    assert torch._C._cuda_isHistoryEnabled()
    def here():
        return alloc(3 * MIB)
    def there(a):
        free(a)
    a, b = here(), here()
    there(a)
    s = snapshot()
    blocks = [x for g in s["segments"] for x in g["blocks"]]
    live = [x for x in blocks if x["address"] == b]
    assert len(live) == 1 and live[0]["state"] == "active_allocated"
    assert ("here" in names(live[0]["frames"])) == (context is not None)
    assert ("here" in names(s["segments"][0]["frames"])) == (context is not None)
    assert all(x["frames"] == [] for x in blocks if x["state"] == "inactive")
    # stacks="all" has frames of shared libraries too.
    has_cpp = any(".so" in f["filename"] or "::" in f["name"] for f in live[0]["frames"])
    assert has_cpp == (stacks == "all" and context is not None), live[0]["frames"]
    trace = s["device_traces"][0]
    if enabled == "state":
        assert len(trace) == 1, trace
    else:
        assert len(trace) == 5, trace  # a map, two allocations, a free: both blocks share a handle
    for e in trace:
        wanted = {"alloc": context in ("alloc", "all"),
                  "free_requested": context in ("alloc", "all")}.get(e["action"])
        assert wanted is None or ("frames" in e) == wanted, (context, e)
        if e["action"] in ("alloc", "segment_map") and "frames" in e:
            assert "here" in names(e["frames"])
        if e["action"] == "free_requested" and "frames" in e:
            # With "all" where it was freed, else where it was allocated.
            assert ("there" if context == "all" else "here") in names(e["frames"]), e
    free(b)
    # "state" has the stacks of what is allocated, so none of a segment in which nothing is
    # (test_memory_plots_free_stack of torch).
    frames = [g["frames"] for g in snapshot()["segments"]]
    assert frames and [f != [] for f in frames] == [context in ("alloc", "all")] * len(frames)
for arguments in itertools.product(("state", "all"), (None, "state", "alloc", "all"), STACKS):
    one(*arguments)
record(None)
assert not torch._C._cuda_isHistoryEnabled()
assert all(t == [] for t in snapshot()["device_traces"])
assert all(b["state"] == "inactive" for g in snapshot()["segments"] for b in g["blocks"])
"""


@pytest.mark.parametrize("stacks", ["python", pytest.param("all", marks=pytest.mark.slow)])
def test_every_combination_of_arguments(stacks: str) -> None:
    simulated(START + f"STACKS = ({stacks!r},)" + COMBINATIONS)


def test_the_ring_keeps_the_newest_and_can_be_cleared() -> None:
    assert values(
        """
record(max_entries=4)
for _ in range(5): free(alloc(1000))
print([e["action"] for e in entries()])
record(max_entries=3)                      # goes on with the newest, one of them of the look above
print(len([e for e in entries() if e["action"] != "snapshot"]))
record(max_entries=100, clear_history=True)
free(alloc(1000))
print([e["action"] for e in entries()])
record(None)
print(entries())
"""
    ) == [
        ["free_completed", "alloc", "free_requested", "free_completed"],
        2,
        ["alloc", "free_requested", "free_completed"],
        [],
    ]


def test_actions_can_be_left_out() -> None:
    assert values(
        """
record(skip_actions=["free_requested", "segment_map", "snapshot"])
free(alloc(1000))
snapshot()
print([e["action"] for e in entries()])
try:
    record(skip_actions=["free_requestet"])
    print("passed")
except RuntimeError as error:
    print(repr(str(error)))
"""
    )[0] == ["alloc", "free_completed"]


def test_threads_say_different_things_about_their_allocations() -> None:
    mine, other, said = values(
        """
import threading
record()
torch.cuda.memory._set_memory_metadata("mine")
adapter._sim_push_compile_context("0/0")
adapter._sim_push_compile_context("1/0")
a = alloc(1000)
def work():
    adapter._sim_set_metadata("other")
    free(alloc(2000))
t = threading.Thread(target=work); t.start(); t.join()
adapter._sim_pop_compile_context()
b = alloc(3000)
adapter._sim_pop_compile_context()
adapter._sim_pop_compile_context()         # one too many
torch.cuda.memory._set_memory_metadata("")
free(a)
what = lambda e: (e["action"], e["size"], e["compile_context"], e["user_metadata"])
print([what(e) for e in entries(0, "alloc", "free_completed") if e["size"] != 2000])
print([what(e) for e in entries(0, "alloc", "free_completed") if e["size"] == 2000])
print((torch.cuda.memory._get_memory_metadata(), torch.cuda.memory._memory_metadata_supported())
      if hasattr(torch.cuda.memory, "_memory_metadata_supported") else ("", True))
"""
    )
    assert mine == [
        ("alloc", 1000, "1/0", "mine"),
        ("alloc", 3000, "0/0", "mine"),
        ("free_completed", 1000, "N/A", ""),
    ]
    assert other == [("alloc", 2000, "N/A", "other"), ("free_completed", 2000, "N/A", "other")]
    assert said == ("", True)


def test_live_blocks_can_be_annotated() -> None:
    simulated(
        START
        + """
if not hasattr(torch._C, "_cuda_annotateMemory"):
    raise SystemExit
torch._C._cuda_annotateMemory(0x1234, "nobody listens")
record()
a = alloc(3 * MIB)
def say(): torch._C._cuda_annotateMemory(a, "saved for backward")
say()
(e,) = entries(0, "annotate")
assert (e["addr"], e["size"], e["user_metadata"]) == (a, 3 * MIB, "saved for backward"), e
assert "say" in names(e["frames"])
for address in (a + 512, 0x1234):
    try:
        torch._C._cuda_annotateMemory(address, "no")
        raise AssertionError("there is no such block")
    except RuntimeError as error:
        assert "no live allocation found" in str(error), error
"""
    )


def test_marks_have_their_device_and_time() -> None:
    simulated(
        START
        + """
adapter._sim_mark(0, {"name": "too early"})
record()
alloc(1000)
adapter._sim_mark(1, {"name": "step", "stage": "START"})
alloc(2000)
s = snapshot()
(mark,) = s["external_annotations"]
first, second = [e for e in s["device_traces"][0] if e["action"] == "alloc"]
assert first["time_us"] <= mark.pop("time_us") <= second["time_us"]
assert mark == {"name": "step", "stage": "START", "device": 1}, mark
record(None)
assert snapshot()["external_annotations"] == []
"""
    )


def test_where_a_pointer_was_allocated() -> None:
    simulated(
        START
        + """
if not hasattr(torch.cuda.memory, "_allocation_traceback"):
    raise SystemExit
a = alloc(1000)
assert torch.cuda.memory._allocation_traceback(a) is None
record(context="state")
def here(): return alloc(1000)
b = here()
assert "here" in names(torch.cuda.memory._allocation_traceback(b))
assert torch.cuda.memory._allocation_traceback(b + 512) is None
assert torch.cuda.memory._allocation_traceback(0x1234) is None
free(b)
assert torch.cuda.memory._allocation_traceback(b) is None
"""
    )


def test_out_of_memory_is_in_the_trace_before_its_observers_are_called() -> None:
    (seen,) = values(
        """
record()
def observer(device, size, total, free):
    found = entries(device, "oom")         # no lock is held: it may look, and allocate
    globals()["told"] = (device, size, total, free, len(found))
    free_address(alloc(1000, device=1))
free_address = globals()["free"]
adapter._sim_on_out_of_memory(observer)
def greedy(): return alloc(9 * GIB - 5)
try:
    greedy()
    raise AssertionError("9 GiB cannot be there")
except torch.OutOfMemoryError:
    pass
(e,) = entries(0, "oom")
assert "greedy" in names(e["frames"])
print(told + (e["size"], e["device_free"]))
"""
    )
    assert seen == (0, 9 * GIB, 8 * GIB, 8 * GIB, 1, 9 * GIB, 8 * GIB)


REJECTION = {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"}


def test_what_exceeds_the_fraction_can_be_rejected_at_once() -> None:
    simulated(
        START
        + """
if "num_oom_rejections" not in torch._C._cuda_memoryStats(0):
    raise SystemExit                       # from torch 2.12 on
record()
adapter._sim_watch_rejections()
kept = alloc(3 * GIB)
reserved = torch._C._cuda_memoryStats(0)["reserved_bytes"]["all"]["current"]
try:
    alloc(2 * GIB)
    raise AssertionError("5 GiB are above the half of 8")
except torch.OutOfMemoryError as error:
    assert str(error).startswith("CUDA out of memory. Allocation was preemptively rejected"), error
stats = torch._C._cuda_memoryStats(0)
assert (stats["num_oom_rejections"], stats["num_ooms"]) == (1, 0), stats
assert adapter._sim_rejections() == [(0, 2 * GIB, reserved, 8 * GIB)], adapter._sim_rejections()
assert entries(0, "oom") == []
torch._C._accelerator_setAllocatorSettings("throw_on_cudamalloc_oom:False")
try:
    alloc(2 * GIB)
except torch.OutOfMemoryError as error:
    assert "Tried to allocate 2.00 GiB" in str(error), error
stats = torch._C._cuda_memoryStats(0)
assert (stats["num_oom_rejections"], stats["num_ooms"]) == (1, 1), stats
""",
        **REJECTION,
    )


def test_trackers_see_everything_from_before_the_first_use_on() -> None:
    first, second, third = values(
        """
early = adapter._SimTracker()              # no device is open yet
a = alloc(3 * MIB)
late = adapter._SimTracker()
free(a)
alloc(1000, device=1)
what = lambda told: [(e["action"], e["device"], e["size"]) for e in told]
print(what(early.take()))
print(what(late.take()))
record()                                   # the history does not change what trackers get ...
record(None)
alloc(1000, device=1)
print(what(early.take()))
assert not torch._C._cuda_isHistoryEnabled()
"""
    )
    frees = [("free_requested", 0, 3 * MIB), ("free_completed", 0, 3 * MIB)]
    others = [("segment_map", 1, 2 * MIB), ("alloc", 1, 1000)]
    assert isinstance(first, list)
    assert first[0][:2] == ("segment_map", 0)
    assert first[1:] == [("alloc", 0, 3 * MIB), *frees, *others]
    assert second == [*frees, *others]
    assert third == [("alloc", 1, 1000)]


def test_trackers_see_plain_segments_exactly() -> None:
    (told,) = values(
        """
tracker = adapter._SimTracker()
torch.cuda.memory._set_memory_metadata("registered")
a = alloc(50 * MIB)
segments = torch.cuda.memory._snapshot()["segments"]
free(a)
torch._C._accelerator_emptyCache()
told = [e for e in tracker.take() if e["action"].startswith("segment")]
assert [(s["address"], s["total_size"]) for s in segments] == [(a, 50 * MIB)]
assert all(e["addr"] == a and e["pool_id"] == (0, 0) and not e["has_stack"] for e in told)
print([(e["action"], e["size"], e["user_metadata"]) for e in told])
""",
        PYTORCH_ALLOC_CONF="gpumemx_mode:plain",
    )
    assert told == [
        ("segment_alloc", 50 * MIB, "registered"),
        ("segment_free", 50 * MIB, "registered"),
    ]


def test_a_tracker_that_fails_fails_the_allocation_and_nothing_else() -> None:
    simulated(
        START
        + """
tracker = adapter._SimTracker()
tracker.fail_at("segment_map")
try:
    alloc(3 * MIB)
    raise AssertionError("the tracker failed")
except RuntimeError as error:
    assert "the tracker could not register this" in str(error), error
assert gpumemx.memory_info(0).live == 0
free(alloc(3 * MIB))
assert gpumemx.memory_info(0).live == 0
"""
    )


def test_dumps_can_be_read_and_drawn(tmp_path: Path) -> None:
    file = tmp_path / "dump.pickle"
    simulated(
        START
        + f"""
import pickle
from torch.cuda import _memory_viz as viz
record()
kept = [alloc(n) for n in (30 * MIB, 700, 5 * MIB, 3 * MIB + 1)]
free(kept.pop(1))
torch.cuda.memory._dump_snapshot({str(file)!r})
with open({str(file)!r}, "rb") as f:
    s = pickle.load(f)
check_schema(s)
check_story(s)
plain = lambda lines: lines
assert "active_allocated" in viz.segments(s, format_flamegraph=plain)
assert "active_allocated" in viz.memory(s, format_flamegraph=plain)
assert "segments: %d" % len(s["segments"]) in viz.segsum(s), viz.segsum(s)
assert "Device 0" in viz.trace(s)
assert "segment_map" in viz.trace(s)
for html in (viz.trace_plot(s), viz.trace_plot(s, plot_segments=True), viz.segment_plot(s)):
    assert "MemoryViz.js" in html
viz.compare(s["segments"], s["segments"], format_flamegraph=plain)
viz.trace_plot(s, filter_freed=True)
"""
    )
    text = file.read_bytes()
    assert pickle.loads(text)["segments"]
    operations = list(pickletools.genops(text))
    if pickle.DEFAULT_PROTOCOL == 4:  # what _dump_snapshot() writes; from Python 3.14 on it is 5
        assert operations[0][1] == 4
    assert not any(op.name in ("GLOBAL", "STACK_GLOBAL", "REDUCE") for op, _, _ in operations)


def test_without_traces_a_snapshot_is_quick_and_has_segments_only() -> None:
    simulated(
        START
        + """
import time
record(context=None)
for _ in range(20000): free(alloc(1000))
kept = [alloc(1000) for _ in range(500)]
best = 9.0
for _ in range(20):
    begin = time.perf_counter()
    s = torch._C._cuda_memorySnapshot((0, 0, False))
    best = min(best, time.perf_counter() - begin)
assert all(t == [] for t in s["device_traces"])
assert sum(len(g["blocks"]) for g in s["segments"]) >= 500
assert best < 0.05, best
"""
    )


def test_the_profiler_gets_every_byte() -> None:
    # The profiler itself writes to stderr where there is no device.
    done = program(
        SIMULATED
        + """
from torch.profiler import ProfilerActivity, profile, record_function
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
    with record_function("first"):
        a, b = alloc(3 * MIB), alloc(1000)
    with record_function("second"):
        free(a)
print({e.key: e.self_device_memory_usage for e in prof.key_averages()})
"""
    )
    assert done.returncode == 0, done.stderr
    told = ast.literal_eval(done.stdout)
    assert told == {"first": 3 * MIB + 1024, "second": -3 * MIB}


def test_the_sanitizers_hooks_are_called() -> None:
    simulated(
        START
        + """
from torch.cuda import _gpu_trace
told = []
_gpu_trace.register_callback_for_memory_allocation(lambda p: told.append(("alloc", p)))
_gpu_trace.register_callback_for_memory_deallocation(lambda p: told.append(("free", p)))
torch._C._activate_gpu_trace()
a = alloc(1000)
free(a)
assert told == [("alloc", a), ("free", a)], told
"""
    )


@pytest.mark.slow
def test_threads_with_stacks_and_garbage_never_stop() -> None:
    # A34: the stacks need the GIL, their end gives Python objects back; neither under our locks.
    simulated(
        START
        + """
import gc, threading, time
record(max_entries=500)
class Cycle:
    def __init__(self):
        self.me, self.address = self, alloc(1000)
    def __del__(self, free=free):
        free(self.address)
errors = []
def work(seed):
    try:
        for i in range(10000):
            # A code object of its own, so that the end of a stack is the end of one.
            if i % 50 == 0:
                exec(f"def f{i}(): free(alloc(2000, stream={1 + 2 * seed}))\\nf{i}()", globals())
            free(alloc(3000, stream=1 + 2 * seed))
            if i % 100 == 0: Cycle()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
for t in threads: t.start()
while any(t.is_alive() for t in threads):
    gc.collect()
    torch.cuda.memory._snapshot()
    time.sleep(0.02)  # the workers need the interpreter's lock at every call
for t in threads: t.join()
assert not errors, errors
gc.collect()
assert gpumemx.memory_info(0).live == 0
"""
    )


def test_a_forked_child_can_go_on_with_the_history_on() -> None:
    simulated(
        START
        + """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
record()
kept = alloc(MIB)
child = os.fork()
if child == 0:
    free(kept)
    adapter._sim_mark(0, {"name": "child"})
    assert torch.cuda.memory._snapshot()["segments"] == []
    record(None)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
check_story(snapshot())
"""
    )
