// SPDX-License-Identifier: BSD-3-Clause
//
// baseline + allocations - frees = what is live, to the byte, whatever part of a run was recorded.
#include "replay/recorded_run.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/pickles.hpp"

namespace gpumemx {
namespace {

using namespace pickles;

constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kBase = 0x7f0000000000;

struct Read {
  Snapshot snapshot;
  std::vector<RecordedRun> runs;
};

Read runs_of(const std::string& bytes) {
  auto snapshot = read(bytes);
  EXPECT_TRUE(snapshot.ok()) << snapshot.error().where;
  Read out{std::move(snapshot).take(), {}};
  auto runs = recorded_runs(out.snapshot);
  EXPECT_TRUE(runs.ok()) << runs.error().where;
  out.runs = std::move(runs).take();
  return out;
}

// What is live after the last event.
std::uint64_t live_at_end(const RecordedRun& run) {
  std::uint64_t live = run.baseline_bytes;
  for (const std::int32_t change : run.change) {
    if (change > 0) {
      const RecordedBlock& block = run.blocks[static_cast<std::size_t>(change - 1)];
      if (block.replaces != RecordedBlock::kNone) {
        live -= run.blocks[static_cast<std::size_t>(block.replaces)].size;
      }
      live += block.size;
    }
    if (change < 0) live -= run.blocks[static_cast<std::size_t>(-change - 1)].size;
  }
  return live;
}

TEST(RecordedRun, CountsWhatWasThereBeforeTheRecording) {
  // Two blocks from before: one is freed in the recording, one is still there. One is new.
  const Read r = runs_of(snapshot(
      {{kBase, 20 * kMiB, {{kBase, 4 * kMiB, 4'000'000}, {kBase + 8 * kMiB, kMiB, 1'000'000}}}},
      {{{"free_requested", kBase + 4 * kMiB, 3'000'000, 10},
        {"free_completed", kBase + 4 * kMiB, 3'000'000, 10},
        {"alloc", kBase + 8 * kMiB, 1'000'000, 12}}}));
  ASSERT_EQ(r.runs.size(), 1u);
  const RecordedRun& run = r.runs[0];
  EXPECT_EQ(run.state, Recording::kOn);
  EXPECT_EQ(run.baseline_bytes, 7'000'000u);
  EXPECT_EQ(run.unknown_frees, 1u);
  EXPECT_EQ(run.live_now, 5'000'000u);
  EXPECT_EQ(live_at_end(run), run.live_now);
  EXPECT_EQ(run.reserved_now, 20u * kMiB);
  EXPECT_EQ(run.reserved_before, 20u * kMiB);
  EXPECT_FALSE(run.overflowed);

  const auto trace = to_trace(r.snapshot, run);
  ASSERT_TRUE(trace.ok());
  EXPECT_EQ(trace.value().op, (std::vector<std::int64_t>{0, 1, ~1, 1}));
  EXPECT_EQ(trace.value().size,
            (std::vector<std::int64_t>{4'000'000, 3'000'000, 3'000'000, 1'000'000}));
  EXPECT_EQ(trace.value().time_us, (std::vector<std::int64_t>{0, 0, 0, 2}));
  EXPECT_EQ(trace.value().slots, 2);
}

TEST(RecordedRun, DoesNotCountABlockThatWaitedForItsStreamBeforeTheRecording) {
  const Read r = runs_of(snapshot({}, {{{"free_completed", kBase, 100, 1},
                                        {"alloc", kBase, 200, 2},
                                        {"free_requested", kBase, 200, 3}}}));
  EXPECT_EQ(r.runs[0].baseline_bytes, 0u);
  EXPECT_EQ(r.runs[0].unknown_frees, 0u);
  EXPECT_EQ(r.runs[0].live_now, 0u);
}

TEST(RecordedRun, TakesCompletedFreesWhereNoOthersWereRecorded) {
  const Read r =
      runs_of(snapshot({}, {{{"alloc", kBase, 200, 2}, {"free_completed", kBase, 200, 3}}}));
  EXPECT_EQ(r.runs[0].live_now, 0u);
  EXPECT_EQ(r.runs[0].change, (std::vector<std::int32_t>{1, -1}));
}

TEST(RecordedRun, KeepsItsBooksWhenEventsAreMissing) {
  // Freed twice, and allocated twice in between: one free and one allocation were not recorded.
  const Read r = runs_of(snapshot({}, {{{"alloc", kBase, 100, 1},
                                        {"free_requested", kBase, 100, 2},
                                        {"free_requested", kBase, 100, 3},
                                        {"alloc", kBase, 300, 4},
                                        {"alloc", kBase, 400, 5}}}));
  const RecordedRun& run = r.runs[0];
  EXPECT_EQ(run.baseline_bytes, 0u);
  EXPECT_EQ(run.unknown_frees, 1u);
  EXPECT_EQ(live_at_end(run), 400u);
  const auto trace = to_trace(r.snapshot, run);
  ASSERT_TRUE(trace.ok());
  EXPECT_EQ(trace.value().op, (std::vector<std::int64_t>{0, ~0, 0, ~0, 0}));
}

TEST(RecordedRun, TellsApartOffStateOnlyAndOn) {
  const auto state = [](const std::string& bytes) { return runs_of(bytes).runs.at(0).state; };
  const Segment plain{kBase, 2 * kMiB, {{kBase, 2 * kMiB, 2 * kMiB}}};
  Segment known = plain;
  known.blocks[0].frames = {frame("train.py", 1, "main")};
  EXPECT_EQ(state(snapshot({plain}, {{}})), Recording::kOff);
  EXPECT_EQ(state(snapshot({known}, {{}})), Recording::kStateOnly);
  // With "state", torch's ring holds one entry: whatever came last.
  EXPECT_EQ(state(snapshot({plain}, {{{"snapshot"}}})), Recording::kStateOnly);
  EXPECT_EQ(state(snapshot({plain}, {{{"segment_alloc", 0, 2 * kMiB}}})), Recording::kStateOnly);
  EXPECT_EQ(state(snapshot({plain}, {{{"alloc", kBase, 2 * kMiB}}})), Recording::kOn);
}

TEST(RecordedRun, TellsAFullRing) {
  const auto overflowed = [](std::int64_t first, int events) {
    std::vector<Entry> entries{{"free_requested", first, 100}};
    while (static_cast<int>(entries.size()) < events) {
      const bool even = entries.size() % 2 == 0;
      entries.push_back({even ? "free_requested" : "alloc", kBase, 100});
    }
    if (first == 0) entries[0] = {"snapshot"};
    return runs_of(snapshot({}, {entries})).runs.at(0).overflowed;
  };
  EXPECT_TRUE(overflowed(kBase + 512, 2000));
  EXPECT_TRUE(overflowed(kBase + 512, 1024));
  EXPECT_FALSE(overflowed(kBase + 512, 1999));  // not a size that anybody chooses: it began late
  EXPECT_FALSE(overflowed(0, 2001));
}

TEST(RecordedRun, BelievesATorchThatTellsWhetherTheRingWasFull) {
  const std::string entries =
      list({Entry{"alloc", kBase, 1}.bytes(), Entry{"alloc", kBase + 512, 1}.bytes()});
  const auto overflowed = [&](bool told) {
    const std::string settings = dict({{"trace_alloc_overflowed", boolean(told)}});
    return runs_of(
               whole(dict({{"device_traces", list({entries})}, {"allocator_settings", settings}})))
        .runs.at(0)
        .overflowed;
  };
  EXPECT_TRUE(overflowed(true));
  EXPECT_FALSE(overflowed(false));
}

TEST(RecordedRun, FollowsReservedBackOverEverySegmentEvent) {
  const Read r =
      runs_of(snapshot({{kBase, 20 * kMiB}}, {{{"segment_alloc", kBase + (64 << 20), 2 * kMiB},
                                               {"segment_map", kBase, 20 * kMiB},
                                               {"segment_free", kBase + (64 << 20), 2 * kMiB},
                                               {"segment_unmap", kBase + (32 << 20), 4 * kMiB}}}));
  EXPECT_EQ(r.runs[0].reserved_before, 4u * kMiB);
  // More got than there is: some segment is not told.
  const Read contradiction =
      runs_of(snapshot({}, {{{"segment_alloc", kBase, kMiB}, {"snapshot"}}}));
  EXPECT_EQ(contradiction.runs[0].reserved_before, std::nullopt);
}

TEST(RecordedRun, KeepsDevicesApart) {
  const Read r = runs_of(
      snapshot({{kBase, 2 * kMiB, {{kBase, 512, 100}}, 3}},
               {{{"alloc", kBase, 7}, {"snapshot"}}, {}, {{"alloc", kBase, 9}, {"snapshot"}}}));
  ASSERT_EQ(r.runs.size(), 3u);
  EXPECT_EQ(r.runs[0].device, 0);
  EXPECT_EQ(r.runs[1].device, 2);
  EXPECT_EQ(r.runs[2].device, 3);
  EXPECT_EQ(r.runs[2].live_now, 100u);
  const auto traces = snapshot_traces(r.snapshot);
  ASSERT_TRUE(traces.ok());
  ASSERT_EQ(traces.value().size(), 2u);
  EXPECT_EQ(traces.value()[1].device, 2);
  EXPECT_EQ(traces.value()[1].size, (std::vector<std::int64_t>{9}));
}

TEST(RecordedRun, NumbersStreamsAndKeepsTimesFromGoingBack) {
  const Read r = runs_of(snapshot({}, {{{"alloc", kBase, 1, 100, 0x5500},
                                        {"alloc", kBase + 512, 1, 90, 0},
                                        {"free_requested", kBase, 1, 130, 0x5500}}}));
  const auto trace = to_trace(r.snapshot, r.runs[0]);
  ASSERT_TRUE(trace.ok());
  EXPECT_EQ(trace.value().stream, (std::vector<std::int16_t>{0, 1, 0}));
  EXPECT_EQ(trace.value().time_us, (std::vector<std::int64_t>{0, 0, 30}));
}

TEST(RecordedRun, CaseA36SaysThatNothingWasRecorded) {
  const Segment plain{kBase, 2 * kMiB, {{kBase, 2 * kMiB, 2 * kMiB}}};
  const auto said = [](const std::string& bytes) {
    const Read r = runs_of(bytes);
    const auto traces = snapshot_traces(r.snapshot);
    return traces.ok() ? "none" : traces.error().where;
  };
  const std::string what_to_do =
      "; call torch.cuda.memory._record_memory_history() before the work that is to be looked at, "
      "then _dump_snapshot()";
  EXPECT_EQ(said(snapshot({plain}, {{}})), "no history: recording was off" + what_to_do);
  EXPECT_EQ(said(snapshot({plain}, {{{"snapshot"}}})),
            "no history: only the state was recorded (enabled=\"state\")" + what_to_do);
}

TEST(RecordedRun, RefusesWhatNoDeviceHolds) {
  std::vector<Entry> entries;
  for (int i = 0; i < 5000; ++i) entries.push_back({"alloc", kBase + i, 1ll << 48});
  auto s = read(snapshot({}, {entries}));
  ASSERT_TRUE(s.ok());
  EXPECT_EQ(recorded_runs(s.value()).error().where,
            "the blocks of device 0 add up to more than any device has: the file is damaged");
}

TEST(RecordedRun, KeepsNativesOwnSegmentEventsOfARecordedSnapshot) {
  auto s = read_snapshot(std::string(GPUMEMX_SOURCE_DIR) + "/tests/data/gnn_sampling.pickle");
  ASSERT_TRUE(s.ok());
  const auto traces = snapshot_traces(s.value());
  ASSERT_TRUE(traces.ok());
  const SnapshotTrace& trace = traces.value().at(0);
  EXPECT_EQ(trace.op.size(), 497u);
  ASSERT_EQ(trace.segments.size(), 27u);
  EXPECT_EQ(trace.segments[0].at, 0u);
  EXPECT_EQ(trace.segments[0].range.size.n, 2'097'152u);
  std::uint64_t sum = 0;
  for (const SegmentEvent& event : trace.segments) sum += event.range.size.n;
  EXPECT_EQ(sum, 7'038'042'112u);
}

}  // namespace
}  // namespace gpumemx
