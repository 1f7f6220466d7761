// SPDX-License-Identifier: BSD-3-Clause
#include "core/memory_report.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

class MemoryReportTest : public AllocatorTest {
 protected:
  MemoryReportTest() : AllocatorTest(device_of(16_GiB)) {}

  // What always holds is checked every time, and that trimming keeps the word of each prediction.
  MemoryReport report() {
    const MemoryReport r = allocator_->memory_report();
    const MemoryFigures& f = r.figures;
    Bytes pools;
    for (const PoolShare& pool : r.pools) pools += pool.reserved;
    EXPECT_EQ(f.device_total, f.reserved + f.others + f.device_free);
    EXPECT_EQ(f.reserved, f.live + f.pending + f.held + f.idle_pending + f.idle_private + f.idle);
    EXPECT_EQ(sum(r.pending_on), f.pending);
    EXPECT_EQ(sum(r.waiting_on), f.idle_pending);
    EXPECT_EQ(r.held_by.all(), f.held + f.idle_private);
    EXPECT_EQ(pools, f.in_private_pools);
    return r;
  }
  Bytes trim(bool wait) {
    const MemoryReport r = report();
    const TrimReport trimmed = allocator_->trim({std::nullopt, {}, wait, /*predict=*/true});
    EXPECT_EQ(trimmed.predicted, wait ? r.releasable_by_waiting : r.releasable);
    EXPECT_EQ(trimmed.predicted, trimmed.released);
    return trimmed.released;
  }
  static Bytes sum(const std::vector<StreamShare>& shares) {
    Bytes all;
    for (const StreamShare& share : shares) all += share.bytes;
    return all;
  }
  const StreamInfo b_ = new_stream();
};

TEST_F(MemoryReportTest, OfNothingIsNothing) {
  const MemoryReport r = report();
  EXPECT_EQ(r.figures.reserved, 0_B);
  EXPECT_TRUE(r.pools.empty());
  EXPECT_EQ(r.releasable_by_waiting, 0_B);
}

TEST_F(MemoryReportTest, TellsRoundingFromWhatWasAskedFor) {
  alloc(1000_B);
  alloc(3_MiB + 5_B);
  const MemoryReport r = report();
  EXPECT_EQ(r.figures.live_requested, 3_MiB + 1005_B);
  EXPECT_EQ(r.figures.live, 3_MiB + 1536_B);
}

TEST_F(MemoryReportTest, PendingBlocksBelongToTheStreamThatIsWaitedFor) {
  const StreamInfo c = new_stream();
  gpu_.set_manual(c.ref, true);
  const DeviceAddr first = alloc(32_MiB + 100_B), second = alloc(64_MiB);
  allocator_->record_stream(first, b_);
  allocator_->record_stream(second, b_);
  allocator_->record_stream(second, c);
  gpu_.launch(c.ref, {});
  free(second);
  (void)report();  // b_ is done with it now
  gpu_.set_manual(b_.ref, true);
  gpu_.launch(b_.ref, {});
  free(first);
  MemoryReport r = report();
  ASSERT_EQ(r.pending_on.size(), 2u);
  EXPECT_EQ(r.pending_on[0].stream, c.ref);
  EXPECT_EQ(r.pending_on[0].bytes, 64_MiB);
  EXPECT_EQ(r.pending_on[1].stream, b_.ref);
  EXPECT_EQ(r.figures.live_requested, 0_B);
  EXPECT_EQ(trim(/*wait=*/false), 0_B);
  gpu_.set_manual(b_.ref, false);
  gpu_.set_manual(c.ref, false);
  EXPECT_EQ(trim(/*wait=*/true), r.figures.reserved);
}

TEST_F(MemoryReportTest, IdleMemoryBelongsToTheStreamThatUsedItLast) {
  gpu_.set_manual(true);
  const DeviceAddr block = alloc(32_MiB, b_);
  gpu_.launch(b_.ref, {writes({block, 32_MiB}, 1)});
  free(block);
  const MemoryReport r = report();
  ASSERT_EQ(r.waiting_on.size(), 1u);
  EXPECT_EQ(r.waiting_on[0].stream, b_.ref);
  EXPECT_EQ(r.waiting_on[0].bytes, 32_MiB);
  EXPECT_EQ(r.releasable, 0_B);
  EXPECT_EQ(r.releasable_by_waiting, 32_MiB);
  gpu_.complete_all();
  EXPECT_EQ(report().waiting_on.size(), 0u);  // it asks the streams
  EXPECT_EQ(trim(/*wait=*/false), 32_MiB);
  gpu_.set_manual(false);
}

TEST_F(MemoryReportTest, WhatIsHeldHasItsHolder) {
  gpu_.set_manual(true);
  alloc(10_MiB + 512_KiB);  // each on handles of 8 MiB
  const DeviceAddr pending = alloc(3_MiB, b_);
  allocator_->record_stream(pending, permanent(main_));
  gpu_.launch(main_, {});
  free(pending);
  const MemoryReport r = report();
  EXPECT_EQ(r.held_by.live, 16_MiB - (10_MiB + 512_KiB));
  EXPECT_EQ(r.held_by.pending, 8_MiB - 3_MiB);
  EXPECT_EQ(r.held_by.pools, 0_B);
  gpu_.set_manual(false);
}

TEST_F(MemoryReportTest, PoolsAreToldOneByOne) {
  const PoolId p = allocator_->create_pool({}), q = allocator_->create_pool({.plain = true});
  const DeviceAddr a = alloc(6_MiB, permanent(main_), p);
  alloc(64_MiB, permanent(main_), q);
  alloc(2_MiB, permanent(main_), p);
  free(a);
  MemoryReport r = report();
  ASSERT_EQ(r.pools.size(), 2u);
  EXPECT_EQ(r.pools[0].pool, p);
  EXPECT_EQ(r.pools[0].users, 1);
  EXPECT_EQ(r.pools[0].reserved, 8_MiB);
  EXPECT_EQ(r.pools[0].live, 2_MiB);
  EXPECT_EQ(r.pools[1].reserved, 64_MiB);
  EXPECT_EQ(r.held_by.pools, 6_MiB);
  EXPECT_EQ(trim(/*wait=*/true), 0_B);
  allocator_->release_pool(p);
  allocator_->release_pool(q);
  EXPECT_EQ(report().pools[0].users, 0);
  EXPECT_EQ(trim(/*wait=*/true), 6_MiB);
}

TEST_F(MemoryReportTest, PlainSegmentsGoWhenNothingIsInThem) {
  Options options;
  options.plain = true;
  start(options);
  const auto blocks = alloc_many(5, 64_MiB);
  free({blocks[0], blocks[3]});
  EXPECT_EQ(trim(/*wait=*/true), 128_MiB);
  gpu_.set_manual(true);
  gpu_.launch(main_, {});
  free(blocks[1]);
  EXPECT_EQ(trim(/*wait=*/false), 0_B);
  gpu_.complete_all();
  EXPECT_EQ(trim(/*wait=*/false), 64_MiB);
  gpu_.set_manual(false);
}

TEST_F(MemoryReportTest, MemoryOnItsWayBackIsStillThere) {
  free(alloc_many(4, 32_MiB));
  EXPECT_EQ(allocator_->give_back_later(), 128_MiB);
  EXPECT_EQ(report().figures.reserved, 128_MiB);
  EXPECT_EQ(trim(/*wait=*/true), 128_MiB);
}

TEST_F(MemoryReportTest, APredictionOfWhatTheDriverRefusesIsNotKept) {
  free(alloc(32_MiB));
  gpu_.fail_nth(DriverCall::kRelease, 1);
  const TrimReport r = allocator_->trim({std::nullopt, {}, /*wait=*/true, /*predict=*/true});
  EXPECT_EQ(r.predicted, 32_MiB);
  EXPECT_LT(r.released, 32_MiB);
}

TEST_F(MemoryReportTest, SaysWhereItsAddressesAre) {
  const DeviceAddr own = alloc(3_MiB);
  const PoolId plain = allocator_->create_pool({.plain = true});
  const DeviceAddr other = alloc(64_MiB, permanent(main_), plain);
  const auto ranges = allocator_->address_ranges();
  const auto has = [&](DeviceAddr a) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [a](const AddrRange& range) { return range.contains(a); });
  };
  EXPECT_TRUE(has(own));
  EXPECT_TRUE(has(other));
  const DeviceAddr others = gpu_.allocate(2_MiB).value();
  EXPECT_FALSE(has(others));
  EXPECT_TRUE(gpu_.free(others).ok());
  allocator_->release_pool(plain);
}

}  // namespace
}  // namespace gpumemx
