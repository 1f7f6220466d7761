// SPDX-License-Identifier: BSD-3-Clause
//
// The replay's own promises: events one at a time, the clock and its skew, the index of the event
// that failed, and the figures that it counts itself. How good the figures are is the core's affair.
#include "replay/replay.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace gpumemx {
namespace {

struct Arrays {
  std::vector<std::int64_t> op;
  std::vector<std::int64_t> size;
  std::vector<std::int16_t> stream;
  std::vector<std::int64_t> time_us;
  std::int64_t slots = 0;

  void add(std::int64_t what, Bytes bytes, int on = 0, std::int64_t at_us = 0) {
    op.push_back(what);
    size.push_back(static_cast<std::int64_t>(bytes.n));
    stream.push_back(static_cast<std::int16_t>(on));
    time_us.push_back(at_us);
    slots = std::max(slots, (what < 0 ? ~what : what) + 1);
  }
  // The first n events of it, or all.
  TraceView view(std::size_t n = SIZE_MAX) const {
    const std::size_t k = std::min(n, op.size());
    return {std::span(op).first(k), std::span(size).first(k), std::span(stream).first(k),
            std::span(time_us).first(k), slots};
  }
};

ReplayReport replay(const TraceView& trace, const ReplayOptions& options = {}) {
  EXPECT_EQ(validate_trace(trace).value_or(""), "");
  Replay replay(trace, options);
  replay.run();
  return replay.report();
}

// Everything but the host time.
void expect_same(const ReplayReport& a, const ReplayReport& b) {
  EXPECT_EQ(a.events, b.events);
  EXPECT_EQ(a.live_peak, b.live_peak);
  EXPECT_EQ(a.reserved_peak, b.reserved_peak);
  EXPECT_EQ(a.driver.calls, b.driver.calls);
  EXPECT_EQ(a.driver.seconds, b.driver.seconds);
  EXPECT_EQ(a.driver.seconds_inline, b.driver.seconds_inline);
  EXPECT_EQ(a.driver.seconds_growth, b.driver.seconds_growth);
  EXPECT_EQ(a.trace_seconds, b.trace_seconds);
  EXPECT_EQ(a.wait_seconds, b.wait_seconds);
  EXPECT_EQ(a.failed_at, b.failed_at);
  EXPECT_EQ(a.paths.hits, b.paths.hits);
  EXPECT_EQ(a.paths.misses, b.paths.misses);
  EXPECT_EQ(a.paths.repointed, b.paths.repointed);
  EXPECT_EQ(a.paths.alias_switches, b.paths.alias_switches);
}

// Blocks of 1 B to 128 MiB on three streams, about 60 live at once.
Arrays random_trace(std::uint32_t seed, std::size_t events) {
  std::mt19937 random(seed);
  Arrays trace;
  std::vector<std::int64_t> live, idle;
  for (std::int64_t slot = 0; slot < 60; ++slot) idle.push_back(slot);
  std::int64_t now = 0;
  while (trace.op.size() < events) {
    now += random() % 400;
    const int on = static_cast<int>(random() % 3);
    const bool allocates = live.empty() || (!idle.empty() && random() % 2 == 0);
    std::vector<std::int64_t>& from = allocates ? idle : live;
    const std::size_t pick = random() % from.size();
    const std::int64_t slot = from[pick];
    from[pick] = from.back();
    from.pop_back();
    (allocates ? live : idle).push_back(slot);
    const std::uint64_t most = std::uint64_t{1} << (random() % 28);
    const Bytes size{1 + random() % most};
    trace.add(allocates ? slot : ~slot, size, on, now);
  }
  return trace;
}

TEST(Replay, GivesTheSameFiguresForAPrefixAsForATraceThatEndsThere) {
  const Arrays trace = random_trace(1, 3000);
  Replay whole(trace.view(), {});
  for (const std::size_t n : {1u, 2u, 63u, 64u, 65u, 500u, 1234u, 2999u, 3000u}) {
    EXPECT_EQ(whole.run(n - whole.events_done()), n);
    expect_same(whole.report(), replay(trace.view(n)));
  }
  EXPECT_TRUE(whole.finished());
}

TEST(Replay, GivesTheSameFiguresForAPrefixWhenRequestsWaitAndFail) {
  const Arrays trace = random_trace(2, 3000);
  ReplayOptions options;
  options.limits.cap = replay(trace.view()).live_peak;
  Replay whole(trace.view(), options);
  for (std::size_t n = 100; n <= 3000 && !whole.finished(); n += 100) {
    whole.run(n - whole.events_done());
    expect_same(whole.report(), replay(trace.view(n), options));
  }
  EXPECT_GT(whole.report().wait_seconds, 0);
  EXPECT_TRUE(whole.failed_at().has_value());
}

TEST(Replay, GivesTheSameFiguresTwice) {
  const Arrays trace = random_trace(3, 3000);
  expect_same(replay(trace.view()), replay(trace.view()));
}

TEST(Replay, DoesNothingForATraceWithoutEvents) {
  Replay replay(TraceView{}, {});
  EXPECT_TRUE(replay.finished());
  EXPECT_EQ(replay.run(), 0u);
  const ReplayReport report = replay.report();
  EXPECT_EQ(report.events, 0u);
  EXPECT_EQ(report.reserved_peak, Bytes{});
  EXPECT_EQ(report.trace_seconds, 0);
  EXPECT_EQ(report.host_ns_per_event, 0);
  EXPECT_EQ(report.failed_at, std::nullopt);
}

TEST(Replay, CountsTheLivePeakFromTheSizesAskedFor) {
  Arrays trace;
  trace.add(0, 1000_B);
  trace.add(1, 3_MiB);
  trace.add(~0, 1000_B);
  trace.add(0, 999_B);
  trace.add(~1, 3_MiB);
  const ReplayReport report = replay(trace.view());
  EXPECT_EQ(report.live_peak, 3_MiB + 1000_B);
  EXPECT_GE(report.reserved_peak, report.live_peak);
}

TEST(Replay, CountsTimeFromTheFirstEvent) {
  Arrays trace;
  trace.add(0, 1_MiB, 0, 5'000'000);
  trace.add(~0, 1_MiB, 0, 6'500'000);
  EXPECT_DOUBLE_EQ(replay(trace.view()).trace_seconds, 1.5);
  EXPECT_DOUBLE_EQ(replay(trace.view(1)).trace_seconds, 0);
}

TEST(Replay, StopsAtTheEventThatRunsOutOfMemory) {
  Arrays trace;
  trace.add(0, 32_MiB);
  trace.add(1, 64_MiB);
  trace.add(~0, 32_MiB);
  trace.add(2, 40_MiB);  // 104 MiB live
  trace.add(~1, 64_MiB);
  ReplayOptions options;
  options.limits.cap = 100_MiB;
  Replay replay(trace.view(), options);
  EXPECT_EQ(replay.run(), 3u);
  EXPECT_TRUE(replay.finished());
  EXPECT_EQ(replay.failed_at(), 3u);
  EXPECT_EQ(replay.run(), 3u);  // it stays there
  const ReplayReport report = replay.report();
  EXPECT_EQ(report.events, 3u);
  EXPECT_EQ(report.live_peak, 96_MiB);
  EXPECT_LE(report.reserved_peak, 100_MiB);
  EXPECT_EQ(report.failed_at, 3u);
}

TEST(Replay, FailsAtARequestThatNoDeviceHolds) {
  Arrays trace;
  trace.add(0, 1_MiB);
  trace.add(1, Bytes{INT64_MAX});
  const ReplayReport report = replay(trace.view());
  EXPECT_EQ(report.failed_at, 1u);
  EXPECT_EQ(report.live_peak, 1_MiB);
}

// Two streams on a device that holds one block: the second request can only be served with memory
// that the first stream freed, when the work queued there is done.
Arrays handover(std::int64_t freed_at_us, std::int64_t wanted_at_us) {
  Arrays trace;
  trace.add(0, 64_MiB, 0, 0);
  trace.add(~0, 64_MiB, 0, freed_at_us);
  trace.add(0, 64_MiB, 1, wanted_at_us);
  trace.add(~0, 64_MiB, 1, wanted_at_us);
  return trace;
}

ReplayOptions one_block(double lag_ms) {
  ReplayOptions options;
  options.limits.cap = 64_MiB;
  options.lag_ms = lag_ms;
  return options;
}

TEST(Replay, WaitsUntilTheOtherStreamsWorkIsDone) {
  const ReplayReport report = replay(handover(1000, 3000).view(), one_block(20));
  EXPECT_EQ(report.failed_at, std::nullopt);
  EXPECT_EQ(report.reserved_peak, 64_MiB);
  // A free of 64 MiB records an event at once (Options::fence_bytes): at 1 ms, complete at 21 ms.
  EXPECT_NEAR(report.wait_seconds, 0.018, 1e-9);
}

TEST(Replay, WaitsForNothingWithoutLag) {
  const ReplayReport report = replay(handover(1000, 3000).view(), one_block(0));
  EXPECT_EQ(report.failed_at, std::nullopt);
  EXPECT_EQ(report.wait_seconds, 0);
}

TEST(Replay, ShiftsLaterEventsByWhatRequestsWaited) {
  // The same handover again, back to the first stream. The second block was freed at 3 ms of the
  // trace, which the first wait made 21 ms of the device: complete at 41 ms. It is wanted at 8 ms of
  // the trace, 26 ms of the device.
  Arrays trace = handover(1000, 3000);
  trace.add(0, 64_MiB, 0, 8000);
  trace.add(~0, 64_MiB, 0, 8000);
  const ReplayReport report = replay(trace.view(), one_block(20));
  EXPECT_EQ(report.failed_at, std::nullopt);
  EXPECT_NEAR(report.wait_seconds, 0.018 + 0.015, 1e-9);
  EXPECT_DOUBLE_EQ(report.trace_seconds, 0.008);  // the waits are not in it
}

TEST(Replay, KeepsBackgroundWorkOutOfTheInlineTime) {
  const ReplayReport report = replay(random_trace(4, 5000).view());
  EXPECT_GT(report.driver.seconds_growth, 0);
  EXPECT_GE(report.driver.seconds_inline, report.driver.seconds_growth);
  EXPECT_GE(report.driver.seconds, report.driver.seconds_inline);
  EXPECT_GT(report.driver.count(DriverCall::kCreate), 0u);
}

TEST(ReplayOptions, RefusesALagThatIsNoTime) {
  ReplayOptions options;
  EXPECT_EQ(options.validate(), std::nullopt);
  for (const double lag : {-1.0, 3.7e6, std::nan(""), HUGE_VAL}) {
    options.lag_ms = lag;
    EXPECT_EQ(options.validate(), "the lag must be from 0 to 3600000 milliseconds (an hour)");
  }
}

TEST(ReplayDeathTest, StopsWhenTheTraceChangesUnderIt) {
  Arrays trace = handover(1000, 3000);
  Replay replay(trace.view(), {});
  trace.op[0] = 1'000'000;
  EXPECT_DEATH(replay.run(), "the trace was changed during its replay");
}

}  // namespace
}  // namespace gpumemx
