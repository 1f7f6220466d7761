// SPDX-License-Identifier: BSD-3-Clause
//
// Case A36, "a snapshot cannot be opened": every schema from torch 2.0 on is read, what was recorded of
// torch 2.11 to the byte, and each file that is no snapshot is refused in words. The same files written
// by Python itself are in tests/python/test_snapshot.py.
#include "replay/snapshot.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/pickles.hpp"

namespace gpumemx {
namespace {

using namespace pickles;

// REQUIRES: it can be read.
Snapshot taken(const std::string& bytes) {
  auto result = read(bytes);
  EXPECT_TRUE(result.ok()) << result.error().where;
  return std::move(result).take();
}

TEST(Snapshot, CaseA36ReadsARecordedOneToTheByte) {
  auto result = read_snapshot(std::string(GPUMEMX_SOURCE_DIR) + "/tests/data/gnn_sampling.pickle");
  ASSERT_TRUE(result.ok()) << result.error().where;
  const Snapshot& s = result.value();
  ASSERT_EQ(s.segments.size(), 27u);
  std::uint64_t reserved = 0;
  for (const SnapshotSegment& segment : s.segments) {
    reserved += segment.size;
    std::uint64_t at = segment.address;
    for (const SnapshotBlock& block : s.blocks_of(segment)) {
      EXPECT_EQ(block.address, at);
      at += block.size;
    }
    EXPECT_EQ(at, segment.address + segment.size);
  }
  EXPECT_EQ(reserved, 7'038'042'112u);
  ASSERT_EQ(s.devices.size(), 1u);
  EXPECT_EQ(s.devices[0].count, 771u);
  const auto count = [&](TraceAction action) {
    return std::count(s.entries.action.begin(), s.entries.action.end(), action);
  };
  EXPECT_EQ(count(TraceAction::kAlloc), 250);
  EXPECT_EQ(count(TraceAction::kFreeRequested), 247);
  EXPECT_EQ(count(TraceAction::kFreeCompleted), 247);
  EXPECT_EQ(count(TraceAction::kSegmentAlloc), 27);
  EXPECT_EQ(s.entries.addr[0], 140'569'982'533'632u);
  EXPECT_EQ(s.entries.size[0], 2'097'152u);
  EXPECT_EQ(s.entries.time_us[0], 1'796'019'541'663'962);
  const auto stack = s.stacks[s.entries.stack[0]];
  ASSERT_EQ(stack.size(), 7u);
  const SnapshotFrame& innermost = s.stacks.frame_at(stack[0]);
  EXPECT_EQ(s.texts[innermost.file], "site-packages/torch/nn/modules/module.py");
  EXPECT_EQ(s.texts[innermost.function], "convert");
  EXPECT_EQ(innermost.line, 1370u);
  EXPECT_EQ(
      s.schema,
      "torch 2.1 or newer: segments, traces, times, frames, expandable segments told, settings, "
      "annotations, compile contexts, user metadata");
}

// torch 2.0: a block tells its request and stack in `history`, and not its address; no times.
TEST(Snapshot, CaseA36ReadsTorch20) {
  const std::string history = list({dict({{"addr", num(4096)},
                                          {"real_size", num(1000)},
                                          {"frames", list({frame("train.py", 7, "main")})}}),
                                    dict({{"addr", num(4096)}, {"real_size", num(5)}})});
  const auto block = [](std::int64_t size, const char* state, Items more) {
    more.insert(more.begin(), {{"size", num(size)}, {"state", text(state)}});
    return dict(more);
  };
  const std::string segment =
      dict({{"device", num(1)},
            {"address", num(4096)},
            {"total_size", num(2 << 20)},
            {"allocated_size", num(1024)},
            {"active_size", num(1024)},
            {"stream", num(0)},
            {"segment_type", text("small")},
            {"blocks", list({block(1024, "active_allocated", {{"history", history}}),
                             block(512, "active_pending_free", {}),
                             block((2 << 20) - 1536, "inactive", {})})}});
  const std::string entry = dict({{"action", text("alloc")},
                                  {"addr", num(4096)},
                                  {"size", num(1000)},
                                  {"stream", num(0)},
                                  {"frames", list({frame("train.py", 7, "main")})}});
  const std::string oom = dict({{"action", text("oom")},
                                {"device_free", num(77)},
                                {"size", num(1 << 30)},
                                {"stream", num(0)}});
  const Snapshot s = taken(whole(dict(
      {{"segments", list({segment})}, {"device_traces", list({list({}), list({entry, oom})})}})));
  EXPECT_EQ(s.schema, "torch 2.0: blocks with history, segments, traces, frames");
  ASSERT_EQ(s.blocks.size(), 3u);
  EXPECT_EQ(s.segments[0].device, 1);
  EXPECT_EQ(s.blocks[0].requested, 1000u);
  EXPECT_EQ(s.blocks[0].stack, s.entries.stack[0]);
  EXPECT_EQ(s.blocks[1].address, 4096u + 1024);
  EXPECT_EQ(s.blocks[1].state, BlockState::kPending);
  EXPECT_EQ(s.blocks[2].address, 4096u + 1536);
  EXPECT_EQ(s.blocks[2].requested, 0u);
  EXPECT_EQ(s.devices[1].count, 2u);
  EXPECT_EQ(s.entries.time_us[0], -1);
  EXPECT_EQ(s.entries.addr[1], 77u);
}

TEST(Snapshot, CaseA36ReadsABareListOfSegments) {
  const Segment segment{4096, 2 << 20, {{4096, 2 << 20, 5000}}};
  const Snapshot s = taken(whole(list({segment.bytes()})));
  EXPECT_EQ(s.schema, "segments only (torch.cuda.memory.memory_snapshot())");
  EXPECT_EQ(s.blocks[0].requested, 5000u);
  EXPECT_TRUE(s.devices.empty());
}

// What newer torches added, and what may come: the keys that mean nothing here are skipped.
TEST(Snapshot, CaseA36ReadsTheNewestAndSkipsWhatItDoesNotKnow) {
  const std::string entry = dict({{"action", text("alloc")},
                                  {"addr", num(4096)},
                                  {"size", num(1)},
                                  {"stream", num(140'000'000'000'000)},
                                  {"time_us", num(1'796'019'541'663'962)},
                                  {"compile_context", text("N/A")},
                                  {"user_metadata", text("step 3")},
                                  {"pool_id", tuple({num(0), num(7)})},
                                  {"of_tomorrow", dict({{"a", list({none()})}})}});
  const std::string annotate = dict({{"action", text("annotate")}, {"addr", num(1)}});
  const std::string settings = dict({{"PYTORCH_CUDA_ALLOC_CONF", text("")},
                                     {"garbage_collection_threshold", "G" + std::string(8, '\0')},
                                     {"roundup_power2_divisions", dict({{"1", num(0)}})},
                                     {"trace_alloc_overflowed", boolean(true)}});
  const std::string annotation = dict(
      {{"stage", text("START")}, {"name", text("step")}, {"device", num(0)}, {"time_us", num(1)}});
  const Snapshot s = taken(whole(dict({{"segments", list({})},
                                       {"device_traces", list({list({entry, annotate})})},
                                       {"allocator_settings", settings},
                                       {"external_annotations", list({annotation})},
                                       {"host_segments", list({dict({{"x", num(1)}})})}})));
  EXPECT_EQ(s.overflowed, true);
  EXPECT_EQ(s.entries.action[1], TraceAction::kOther);
  EXPECT_EQ(s.texts[s.entries.metadata[0]], "step 3");
  EXPECT_EQ(s.streams[s.entries.stream[0]], 140'000'000'000'000);
  EXPECT_NE(s.schema.find("pools of entries, overflow told"), std::string::npos);
}

TEST(Snapshot, ReadsExpandableSegmentsAndPrivatePools) {
  const Snapshot s =
      taken(snapshot({{4096, 4096, {}, 0, true, 0}, {16384, 4096, {}, 2, false, 5}}, {}));
  EXPECT_TRUE(s.segments[0].expandable);
  EXPECT_FALSE(s.segments[0].private_pool);
  EXPECT_TRUE(s.segments[1].private_pool);
  EXPECT_EQ(s.segments[1].device, 2);
}

TEST(Snapshot, KeepsEachStackOnce) {
  const std::vector<std::string> one{frame("a.py", 1, "f"), frame("b.py", 2, "g")};
  const std::vector<std::string> other{frame("b.py", 2, "g"), frame("a.py", 1, "f")};
  const Snapshot s = taken(snapshot({}, {{{"alloc", 4096, 1, 0, 0, one},
                                          {"alloc", 8192, 1, 0, 0, other},
                                          {"alloc", 12288, 1, 0, 0, one},
                                          {"alloc", 16384, 1}}}));
  EXPECT_EQ(s.stacks.size(), 3u);
  EXPECT_EQ(s.entries.stack[0], s.entries.stack[2]);
  EXPECT_NE(s.entries.stack[0], s.entries.stack[1]);
  EXPECT_EQ(s.entries.stack[3], 0u);
}

TEST(Snapshot, TakesListsAndEntriesThatAreSharedByTheMemo) {
  // One frames list for two entries, one entry twice, in another order than it was written.
  const std::string frames = "](" + frame("a.py", 1, "f") + "e\x94";
  const std::string first = "}(" + text("action") + text("alloc") + text("addr") + num(4096) +
                            text("size") + num(10) + text("frames") + frames + "u\x94";
  const std::string second = "}(" + text("action") + text("alloc") + text("addr") + num(8192) +
                             text("size") + num(20) + text("frames") + std::string("h\0", 2) + "u";
  const std::string trace = "](" + first + second + "h\x01" + "e";
  const Snapshot s = taken(whole(dict({{"device_traces", "](" + trace + "e"}})));
  ASSERT_EQ(s.devices[0].count, 3u);
  const std::size_t at = s.devices[0].first;
  EXPECT_EQ(s.entries.size[at], 10u);
  EXPECT_EQ(s.entries.size[at + 1], 20u);
  EXPECT_EQ(s.entries.size[at + 2], 10u);
  EXPECT_EQ(s.entries.stack[at], s.entries.stack[at + 1]);
}

TEST(Snapshot, CaseA36SaysWhatIsNoSnapshot) {
  EXPECT_EQ(mistake(whole(num(1))).find("not a memory snapshot: it is an int, not a dict"), 0u);
  EXPECT_EQ(mistake(whole(dict({{"weights", num(1)}})))
                .find("not a memory snapshot: it has neither 'segments' nor 'device_traces'"),
            0u);
  EXPECT_EQ(mistake(whole(dict({}))).find("not a memory snapshot: it has neither"), 0u);
  EXPECT_EQ(mistake(whole(list({num(1)}))).find("segments[0] is an int that is no segment"), 0u);
}

TEST(Snapshot, CaseA36SaysWhichValueIsOfAWrongType) {
  const auto entry = [](const Items& changed) {
    Items items{{"action", text("alloc")}, {"addr", num(4096)}, {"size", num(10)}};
    for (const auto& [key, value] : changed) {
      std::erase_if(items, [&](const auto& item) { return item.first == key; });
      items.push_back({key, value});
    }
    const std::string said = mistake(whole(dict({{"device_traces", list({list({dict(items)})})}})));
    return said.substr(0, said.find(" (byte"));
  };
  EXPECT_EQ(entry({}), "none");
  EXPECT_EQ(entry({{"size", text("10")}}), "a trace entry: 'size' is a str, not an int");
  EXPECT_EQ(entry({{"size", num(-5)}}),
            "a trace entry: 'size' is -5; it must be from 0 to 281474976710656");
  EXPECT_EQ(entry({{"size", num(1ll << 60)}}),
            "a trace entry: 'size' is 1152921504606846976; it must be from 0 to 281474976710656");
  EXPECT_EQ(entry({{"addr", none()}}), "a trace entry: 'addr' is None, not an int");
  EXPECT_EQ(entry({{"action", num(1)}}), "a trace entry: 'action' is an int, not a str");
  EXPECT_EQ(entry({{"stream", text("0")}}), "a trace entry: 'stream' is a str, not an int");
  EXPECT_EQ(entry({{"time_us", num(-1)}}),
            "a trace entry: 'time_us' is -1; it must be from 0 to 9007199254740992");
  EXPECT_EQ(entry({{"frames", num(1)}}), "a trace entry: 'frames' is an int, not a list");
  EXPECT_EQ(
      entry({{"frames", list({num(1)})}}),
      "a trace entry: 'frames' has an int that is no frame (a dict with 'filename', 'line' and "
      "'name')");
  EXPECT_EQ(entry({{"user_metadata", num(1)}}),
            "a trace entry: 'user_metadata' is an int, not a str");

  const auto whole_of = [](const std::string& segments, const std::string& traces) {
    return mistake(whole(dict({{"segments", segments}, {"device_traces", traces}})));
  };
  EXPECT_EQ(whole_of(num(1), list({})), "'segments' is an int, not a list of segments");
  EXPECT_EQ(whole_of(list({}), num(1)), "'device_traces' is an int, not a list of lists");
  EXPECT_EQ(whole_of(list({}), list({none()})),
            "device_traces[0] is None, not a list of trace entries");
  EXPECT_EQ(whole_of(list({}), list({list({none()})})),
            "device_traces[0][0] is None that is no trace entry (a dict with 'action')");
  const auto segment = [](const std::string& blocks) {
    return dict({{"address", num(0)}, {"total_size", num(1)}, {"blocks", blocks}});
  };
  EXPECT_EQ(whole_of(list({segment(num(1))}), list({})).substr(0, 45),
            "a segment: 'blocks' is an int, not a list (by");
  EXPECT_EQ(whole_of(list({segment(list({none()}))}), list({})).substr(0, 42),
            "a segment: 'blocks' has None that is no bl");
}

TEST(Snapshot, RefusesWhatCannotBeAddedUp) {
  std::vector<Segment> segments(17, Segment{0, 1ll << 48});
  EXPECT_EQ(mistake(snapshot(segments, {})), "the segments' sizes add up to more than 4 PiB");
  std::vector<std::vector<Entry>> devices(1025);
  EXPECT_EQ(mistake(snapshot({}, devices)),
            "'device_traces' has 1025 devices; at most 1024 are supported");
}

// Otherwise a file of some megabytes could stand for any amount of work.
TEST(Snapshot, RefusesToSayOneThingManyTimes) {
  const std::string trace = "](" + Entry{"alloc", 4096, 1}.bytes() + "e\x94";
  EXPECT_EQ(mistake(whole(dict({{"device_traces", "](" + trace + std::string("h\0", 2) + "e"}}))),
            "device_traces[1] is another device's too");
  const std::string segment = Segment{4096, 512}.bytes() + "\x94";
  EXPECT_EQ(mistake(whole(dict({{"segments", "](" + segment + std::string("h\0", 2) + "e"}}))),
            "segments[1] is there twice");
  const std::string blocks = "](" + Block{4096, 512}.bytes() + "e";
  const auto with = [](const std::string& of) {
    return dict({{"address", num(4096)}, {"total_size", num(512)}, {"blocks", of}});
  };
  const std::string two = list({with(blocks + "\x94"), with(std::string("h\0", 2))});
  EXPECT_EQ(mistake(whole(dict({{"segments", two}}))).find("a segment: its 'blocks' are another"),
            0u);
}

TEST(Snapshot, RefusesAnEntryThatIsChangedLater) {
  const std::string entry = "}(" + text("action") + text("alloc") + text("addr") + num(4096) +
                            text("size") + num(10) + "u\x94" + text("size") + num(11) + "s";
  EXPECT_EQ(mistake(whole(entry)).find("a list or dict is changed after it was complete"), 0u);
}

}  // namespace
}  // namespace gpumemx
