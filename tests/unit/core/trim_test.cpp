// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

Bytes sum(const TrimReport& r) {
  return r.released + r.live + r.held + r.pending + r.pools + r.wanted;
}

class TrimTest : public AllocatorTest {
 protected:
  TrimTest() : AllocatorTest(device_of(16_GiB)) {}
  // The sum is checked every time.
  TrimReport trim(TrimRequest request) {
    const Bytes before = reserved();
    request.predict = !request.pool && request.target.n == 0;
    const TrimReport report = allocator_->trim(request);
    if (request.predict) {
      EXPECT_EQ(report.predicted, report.released);
    }
    EXPECT_EQ(sum(report), before);
    EXPECT_EQ(before - report.released, reserved());
    EXPECT_EQ(gpu_.reserved_bytes(), reserved());
    EXPECT_EQ(allocator_->validate().value_or(""), "");
    return report;
  }
  const StreamInfo b_ = new_stream();
};

TEST_F(TrimTest, OfNothingReportsNothing) { EXPECT_EQ(trim({}).released, 0_B); }

TEST_F(TrimTest, GivesBackAllThatIsIdleAndSaysWhyTheRestStays) {
  const DeviceAddr idle = alloc(64_MiB);
  alloc(10_MiB);
  alloc(3_MiB);  // 4 MiB: one is held
  free(idle);
  const TrimReport r = trim({});
  EXPECT_EQ(r.released, 64_MiB);
  EXPECT_EQ(r.live, 13_MiB);
  EXPECT_EQ(r.held, reserved() - 13_MiB);
  EXPECT_EQ(r.pending, 0_B);
  EXPECT_EQ(r.pools, 0_B);
  EXPECT_EQ(r.wanted, 0_B);
}

// In a capture a trim does not wait: it gives back, and predicts, what it finds complete.
TEST_F(TrimTest, InACaptureItPredictsWhatIsFoundCompleteNotWhatWasKnownBefore) {
  gpu_.set_manual(true);
  const DeviceAddr x = alloc(64_MiB);
  gpu_.launch(main_, {writes({x, 64_MiB}, 1)});
  free(x);  // with an event
  gpu_.begin_capture(b_.ref, CaptureMode::kRelaxed);
  allocator_->begin_capture();
  gpu_.complete_all();  // which nobody has asked for yet
  EXPECT_EQ(trim({.pool = std::nullopt, .target = {}, .wait = true}).released, 64_MiB);
  EXPECT_TRUE(gpu_.end_capture(b_.ref).ok());
  allocator_->end_capture();
  gpu_.set_manual(false);
}

TEST_F(TrimTest, StopsAtTheTarget) {
  free(alloc_many(4, 32_MiB));  // handles of 8 MiB
  const TrimReport r = trim({.pool = std::nullopt, .target = 100_MiB, .wait = true});
  EXPECT_EQ(r.released, 32_MiB);
  EXPECT_EQ(r.wanted, 96_MiB);
}

TEST_F(TrimTest, ATargetAboveWhatIsReservedReleasesNothing) {
  free(alloc(32_MiB));
  EXPECT_EQ(trim({.pool = std::nullopt, .target = 1_GiB, .wait = true}).wanted, 32_MiB);
}

TEST_F(TrimTest, WaitsForTheWorkOnWhatGoes) {
  gpu_.set_lag_us(5000);
  const DeviceAddr block = alloc(32_MiB);
  gpu_.launch(main_, {writes({block, 32_MiB}, 1)});
  free(block);
  EXPECT_EQ(trim({}).released, 32_MiB);
  EXPECT_GE(gpu_.waited_us(), 5000);
}

TEST_F(TrimTest, WithoutWaitingLeavesWhatIsNotComplete) {
  gpu_.set_manual(true);
  const DeviceAddr block = alloc(32_MiB);
  gpu_.launch(main_, {writes({block, 32_MiB}, 1)});
  free(block);
  const TrimReport r = trim({.pool = std::nullopt, .target = {}, .wait = false});
  EXPECT_EQ(r.released, 0_B);
  EXPECT_EQ(r.pending, 32_MiB);
  EXPECT_EQ(gpu_.waits(), 0u);
  gpu_.complete_all();
  EXPECT_EQ(trim({.pool = std::nullopt, .target = {}, .wait = false}).released, 32_MiB);
  gpu_.set_manual(false);
}

TEST_F(TrimTest, WaitsForBlocksThatAreStillPendingOnOtherStreams) {
  gpu_.set_lag_us(5000);
  const DeviceAddr block = alloc(32_MiB);
  allocator_->record_stream(block, b_);
  gpu_.launch(b_.ref, {writes({block, 32_MiB}, 1)});
  gpu_.launch(main_, {});
  free(block);
  EXPECT_EQ(trim({}).released, 32_MiB);
}

TEST_F(TrimTest, WaitsForAllWorkHoweverManyEventsAreInFlight) {
  Options options;
  options.max_fences = 2;
  start(options);
  gpu_.set_lag_us(5000);
  const auto blocks = alloc_many(6, 64_MiB);
  for (const DeviceAddr b : blocks) {
    gpu_.launch(main_, {writes({b, 64_MiB}, 1)});
    free(b);
  }
  EXPECT_EQ(trim({}).released, 384_MiB);
}

TEST_F(TrimTest, DuringACaptureWaitsForNothing) {
  gpu_.set_manual(true);
  const DeviceAddr block = alloc(32_MiB);
  gpu_.launch(main_, {writes({block, 32_MiB}, 1)});
  free(block);
  gpu_.begin_capture(b_.ref, CaptureMode::kGlobal);
  allocator_->begin_capture();
  EXPECT_EQ(trim({}).pending, 32_MiB);
  EXPECT_EQ(gpu_.waits(), 0u);
  EXPECT_TRUE(gpu_.end_capture(b_.ref).ok());
  allocator_->end_capture();
  gpu_.set_manual(false);
}

TEST_F(TrimTest, AfterwardsTheProgramGrowsAnewAndNotToItsOldPeak) {
  free(alloc(1_GiB));
  trim({});
  free(alloc(64_MiB));
  free(alloc(64_MiB - 512_KiB));  // moves the same memory
  EXPECT_EQ(reserved(), 64_MiB);
}

TEST_F(TrimTest, ToATargetKeepsThePeakThatMayBeReached) {
  free(alloc(1_GiB));
  trim({.pool = std::nullopt, .target = 1_B, .wait = true});
  free(alloc(64_MiB));
  free(alloc(64_MiB - 512_KiB));  // growth within the budget comes first
  EXPECT_EQ(reserved(), 128_MiB);
}

TEST_F(TrimTest, SegmentsAreHeldWholeByOneLiveBlock) {
  Options options;
  options.plain = true;
  start(options);
  const auto blocks = alloc_many(3, 5_MiB);  // one segment of 20 MiB
  free({blocks[0], blocks[2]});
  const TrimReport r = trim({});
  EXPECT_EQ(r.released, 0_B);
  EXPECT_EQ(r.live, 5_MiB);
  EXPECT_EQ(r.held, 15_MiB);
  free(blocks[1]);
  EXPECT_EQ(trim({}).released, 20_MiB);
}

TEST_F(TrimTest, SegmentsWhoseWorkRunsArePendingWithoutWaiting) {
  Options options;
  options.plain = true;
  start(options);
  gpu_.set_manual(true);
  const DeviceAddr block = alloc(32_MiB);
  gpu_.launch(main_, {writes({block, 32_MiB}, 1)});
  free(block);
  const TrimReport r = trim({.pool = std::nullopt, .target = {}, .wait = false});
  EXPECT_EQ(r.pending, 32_MiB);
  EXPECT_EQ(r.wanted, 0_B);
  gpu_.complete_all();
  gpu_.set_manual(false);
}

TEST_F(TrimTest, ASegmentThatTheDriverDoesNotFreeStaysInTheBooks) {
  Options options;
  options.plain = true;
  start(options);
  free(alloc(32_MiB));
  gpu_.fail_nth(DriverCall::kFree, 1);
  EXPECT_EQ(allocator_->trim({}).released, 0_B);  // and not what was predicted
  EXPECT_EQ(trim({}).released, 32_MiB);
}

TEST_F(TrimTest, OnePoolGivesBackWhatItHadAndNothingElse) {
  const DeviceAddr other = alloc(32_MiB);
  const PoolId pool = allocator_->create_pool({});
  free(alloc(64_MiB, permanent(main_), pool));
  free(other);
  EXPECT_EQ(trim({.pool = pool, .target = {}, .wait = true}).released, 0_B);  // still used
  allocator_->release_pool(pool);
  const TrimReport r = trim({.pool = pool, .target = {}, .wait = true});
  EXPECT_EQ(r.released, 64_MiB);
  EXPECT_EQ(r.wanted, 32_MiB);
  EXPECT_EQ(r.pools, 0_B);
}

TEST_F(TrimTest, IdleMemoryOfAPoolInUseIsNamedAsSuch) {
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr live = alloc(8_MiB, permanent(main_), pool);
  free(alloc(64_MiB, permanent(main_), pool));
  const TrimReport r = trim({});
  EXPECT_EQ(r.released, 0_B);
  EXPECT_EQ(r.live, 8_MiB);
  EXPECT_EQ(r.pools, 64_MiB);
  free(live);
  allocator_->release_pool(pool);
}

TEST_F(TrimTest, WhatIsMarkedAsReturningIsNotReservedAndCostsNoDriverCall) {
  const DeviceAddr live = alloc(32_MiB);
  free(alloc(64_MiB));
  gpu_.reset_meter();
  EXPECT_EQ(allocator_->give_back_later(), 64_MiB);
  EXPECT_EQ(gpu_.meter().seconds, 0);
  EXPECT_EQ(allocator_->returning(), 64_MiB);
  EXPECT_EQ(stats().returning_bytes, 64_MiB);
  EXPECT_EQ(reserved(), 32_MiB);
  EXPECT_EQ(gpu_.reserved_bytes(), 96_MiB);
  EXPECT_FALSE(allocator_->maintain());  // only when asked to
  EXPECT_EQ(gpu_.reserved_bytes(), 96_MiB);
  free(live);  // freed since, so it stays
  EXPECT_EQ(allocator_->returning(), 64_MiB);
}

TEST_F(TrimTest, NothingIsMarkedWhileAReleasedPoolHasIdleMemory) {
  const StreamInfo stream = permanent(main_);
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr in_use = alloc(32_MiB, stream, pool);
  const DeviceAddr freed = alloc(48_MiB, stream, pool);
  free(alloc(64_MiB));
  EXPECT_EQ(allocator_->give_back_later(), 64_MiB);  // not released yet: its memory is its own
  allocator_->release_pool(pool);
  EXPECT_EQ(allocator_->give_back_later(), 64_MiB);  // all of it is in use
  free(freed);
  EXPECT_EQ(allocator_->give_back_later(), std::nullopt);
  allocator_->trim({});
  EXPECT_EQ(reserved(), 32_MiB);
  EXPECT_EQ(allocator_->give_back_later(), 0_B);
  free(in_use);
}

TEST_F(TrimTest, NothingIsMarkedWhileAHistoryIsRecorded) {
  free(alloc(64_MiB));
  allocator_->record_history(100);
  EXPECT_EQ(allocator_->give_back_later(), std::nullopt);
  EXPECT_EQ(allocator_->returning(), 0_B);
}

TEST_F(TrimTest, ARequestTakesReturningMemoryBack) {
  const DeviceAddr block = alloc(64_MiB);
  free(block);
  EXPECT_EQ(allocator_->give_back_later(), 64_MiB);
  gpu_.reset_meter();
  EXPECT_EQ(alloc(64_MiB), block);
  EXPECT_EQ(gpu_.meter().seconds, 0);
  EXPECT_EQ(allocator_->returning(), 0_B);
  EXPECT_EQ(reserved(), 64_MiB);
  free(block);
  EXPECT_EQ(allocator_->returning(), 0_B);  // the mark was for what was idle then
  EXPECT_EQ(reserved(), 64_MiB);
}

TEST_F(TrimTest, MaintainReleasesReturningMemoryWhenAskedOneCallAtATime) {
  free(alloc(64_MiB));
  EXPECT_EQ(allocator_->give_back_later(), 64_MiB);
  int steps = 0;
  for (; allocator_->maintain(/*release_returning=*/true); ++steps) {
    EXPECT_EQ(allocator_->validate().value_or(""), "");
  }
  EXPECT_EQ(steps, 2 * 4);  // an unmap and a release for each of four handles
  EXPECT_EQ(gpu_.reserved_bytes(), 0_B);
  EXPECT_EQ(reserved(), 0_B);
  EXPECT_EQ(allocator_->returning(), 0_B);
}

TEST_F(TrimTest, ReturningMemoryThatWorkUsesStaysUntilThatIsDone) {
  gpu_.set_manual(true);
  const DeviceAddr block = alloc(64_MiB);
  gpu_.launch(main_, {writes({block, 64_MiB}, 1)});
  free(block);
  EXPECT_EQ(allocator_->give_back_later(), 64_MiB);
  EXPECT_FALSE(allocator_->maintain(/*release_returning=*/true));
  EXPECT_EQ(gpu_.reserved_bytes(), 64_MiB);
  gpu_.complete_all();
  gpu_.set_manual(false);
  free(alloc(1_MiB));  // asks the streams; takes a piece of it
  while (allocator_->maintain(/*release_returning=*/true)) {
  }
  EXPECT_LE(gpu_.reserved_bytes(), 16_MiB);
}

}  // namespace
}  // namespace gpumemx
