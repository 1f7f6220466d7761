// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

class PoolsTest : public AllocatorTest {
 protected:
  PoolsTest() : AllocatorTest(device_of(4_GiB)) {}
  const StreamInfo a_ = permanent(main_);
  const StreamInfo b_ = new_stream();
};

TEST_F(PoolsTest, EachPoolHasItsOwnMemory) {
  const PoolId one = allocator_->create_pool({}), two = allocator_->create_pool({});
  EXPECT_NE(one, two);
  EXPECT_NE(one, kDefaultPool);
  free(alloc(64_MiB, a_, one));
  alloc(64_MiB, a_, two);
  alloc(64_MiB, a_);
  EXPECT_EQ(reserved(), 192_MiB);  // what is idle in the first goes to none of them
  EXPECT_EQ(paths().private_blocks, 2u);
}

TEST_F(PoolsTest, MemoryIsReusedWithinThePoolAtTheSamePlace) {
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr first = alloc(64_MiB, a_, pool);
  free(first);
  gpu_.reset_meter();
  EXPECT_EQ(alloc(64_MiB, a_, pool), first);
  EXPECT_EQ(mapping_calls(), 0u);
  EXPECT_EQ(allocator_->find_block(first)->pool, pool);
}

TEST_F(PoolsTest, MemoryOfAPoolInUseNeverMovesNotEvenUnderPressure) {
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr block = alloc(1_GiB, a_, pool);
  gpu_.begin_capture(main_, CaptureMode::kRelaxed);
  gpu_.launch(main_, {writes({block, 1_GiB}, 9)});
  gpu_.launch(main_, {reads({block, 1_GiB}, 9)});
  const auto graph = gpu_.end_capture(main_);
  ASSERT_TRUE(graph.ok());
  free(block);
  const AllocResult too_much = try_alloc(3584_MiB, a_);
  ASSERT_FALSE(too_much.ok());
  EXPECT_EQ(too_much.failure->cause, OomCause::kHeldByPools);
  EXPECT_EQ(too_much.failure->idle_private, 1_GiB);
  EXPECT_EQ(too_much.failure->in_private_pools, 1_GiB);
  allocator_->trim({});
  gpu_.replay_graph(graph.value(), b_.ref);  // its memory must still be there
  gpu_.complete_all();
}

TEST_F(PoolsTest, TakesIdleMemoryOfOthersOnlyWhenItIsComplete) {
  gpu_.set_manual(true);
  const DeviceAddr block = alloc(64_MiB);
  gpu_.launch(main_, {writes({block, 64_MiB}, 1)});
  free(block);
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr first = alloc(64_MiB, a_, pool);  // of the same stream, but not complete
  EXPECT_EQ(reserved(), 128_MiB);
  gpu_.complete_all();
  const DeviceAddr second = alloc(64_MiB, a_, pool);
  EXPECT_EQ(reserved(), 128_MiB);
  gpu_.set_manual(false);
  free({first, second});
}

TEST_F(PoolsTest, GivesItsMemoryToOthersAfterTheLastRelease) {
  const PoolId pool = allocator_->create_pool({});
  allocator_->retain_pool(pool);
  free(alloc(64_MiB, a_, pool));
  allocator_->release_pool(pool);
  alloc(64_MiB, b_);
  EXPECT_EQ(reserved(), 128_MiB);  // one user is left
  allocator_->release_pool(pool);
  alloc(64_MiB, b_);
  EXPECT_EQ(reserved(), 128_MiB);
  EXPECT_EQ(paths().harvested_loose, 4u);
}

TEST_F(PoolsTest, WaitsForTheWorkOfEveryStreamThatMayReplayAGraph) {
  alloc(512_B, b_);  // so that the allocator knows the stream
  const PoolId pool = allocator_->create_pool({});
  free(alloc(64_MiB, a_, pool));
  gpu_.set_manual(b_.ref, true);
  gpu_.launch(b_.ref, {});
  allocator_->release_pool(pool);
  alloc(64_MiB);
  EXPECT_EQ(paths().harvested_loose, 0u);
  gpu_.complete(b_.ref);
  alloc(64_MiB);
  EXPECT_EQ(paths().harvested_loose, 4u);
  gpu_.set_manual(b_.ref, false);
}

TEST_F(PoolsTest, WaitsForAStreamThatWasOnlyNotedWhenAGraphIsReplayedThere) {
  gpu_.set_manual(true);
  const StreamInfo c = new_stream();
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr block = alloc(30_MiB, a_, pool);
  gpu_.begin_capture(main_, CaptureMode::kRelaxed);
  gpu_.launch(main_, {writes({block, 30_MiB}, 9)});
  gpu_.launch(main_, {reads({block, 30_MiB}, 9)});
  const auto graph = gpu_.end_capture(main_);
  ASSERT_TRUE(graph.ok());
  allocator_->note_stream(c);  // nothing was ever allocated on it
  gpu_.replay_graph(graph.value(), c.ref);
  free(block);
  allocator_->release_pool(pool);
  const DeviceAddr other = alloc(40_MiB, b_);
  gpu_.launch(b_.ref, {writes({other, 40_MiB}, 5)});
  gpu_.complete(b_.ref);
  gpu_.complete(
      c.ref);  // the graph runs last and must find its memory: hazards are checked at the end
  EXPECT_EQ(reserved(), 70_MiB);
  gpu_.complete_all();
}

TEST_F(PoolsTest, HeapSetsOfStreamsThatAreGoneAreTakenApart) {
  for (int i = 0; i < 120; ++i) {
    const StreamInfo stream = temporary(gpu_.new_stream());
    for (const Bytes size : {1_KiB, 3_MiB, 8_MiB}) free(alloc(size, stream));
    gpu_.destroy_stream(stream.ref);
  }
  // They would have used up the addresses long ago, and served the rest from plain memory.
  EXPECT_EQ(paths().plain_segments, 0u);
  EXPECT_LE(reserved(), 64_MiB);
  EXPECT_EQ(allocator_->validate().value_or(""), "");
}

TEST_F(PoolsTest, ATemporaryStreamThatLivesOnGetsANewHeapSet) {
  const StreamInfo stays = temporary(gpu_.new_stream());
  free(alloc(8_MiB, stays));
  const DeviceAddr kept = alloc(3_MiB, stays);
  for (int i = 0; i < 100; ++i) {
    const StreamInfo stream = temporary(gpu_.new_stream());
    free(alloc(8_MiB, stream));
    gpu_.destroy_stream(stream.ref);
  }
  EXPECT_EQ(allocator_->find_block(kept)->size, 3_MiB);  // a set with something in use stays
  free(kept);
  const DeviceAddr again = alloc(8_MiB, stays);
  ASSERT_TRUE(allocator_->record_stream(again, b_));
  free(again);
  EXPECT_EQ(allocator_->validate().value_or(""), "");
}

TEST_F(PoolsTest, BlocksThatOutliveTheirPoolGoWithTheirFree) {
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr idle = alloc(64_MiB, a_, pool);
  const DeviceAddr live = alloc(32_MiB, a_, pool);
  free(idle);
  allocator_->release_pool(pool);
  EXPECT_EQ(allocator_->trim({}).released, 64_MiB);
  EXPECT_EQ(allocator_->find_block(live)->pool, pool);
  free(live);
  EXPECT_EQ(allocator_->trim({}).released, 32_MiB);
  EXPECT_EQ(reserved(), 0_B);
}

TEST_F(PoolsTest, AddressesOfADeadPoolAreUsedAgain) {
  for (int i = 0; i < 400; ++i) {  // far more regions than the address space has
    const PoolId pool = allocator_->create_pool({});
    ASSERT_TRUE(try_alloc(8_MiB, a_, pool).ok()) << i;
    allocator_->free(allocator_->blocks()[0].address);
    allocator_->release_pool(pool);
  }
  allocator_->trim({});
  EXPECT_EQ(reserved(), 0_B);
}

TEST_F(PoolsTest, APlainPoolIsOrdinaryDeviceMemoryInVirtualMode) {
  const PoolId pool = allocator_->create_pool({.plain = true});
  const DeviceAddr block = alloc(5_MiB, a_, pool);
  EXPECT_EQ(allocator_->find_block(block)->heap, HeapKind::kPlainLarge);
  EXPECT_EQ(calls(DriverCall::kAllocate), 1u);
  EXPECT_EQ(mapping_calls(), 0u);
  EXPECT_EQ(paths().plain_segments, 1u);
  EXPECT_EQ(reserved(), 20_MiB);
  alloc(1_MiB, a_);
  EXPECT_EQ(calls(DriverCall::kCreate), 1u);  // others are not plain
  free(block);
  EXPECT_EQ(allocator_->trim({}).released, 0_B);
  allocator_->release_pool(pool);
  EXPECT_EQ(allocator_->trim({}).released, 20_MiB);
  EXPECT_EQ(calls(DriverCall::kFree), 1u);
}

TEST_F(PoolsTest, APlainPoolIsNotFreedDuringACapture) {
  const PoolId pool = allocator_->create_pool({.plain = true});
  free(alloc(5_MiB, a_, pool));
  gpu_.begin_capture(b_.ref, CaptureMode::kGlobal);
  allocator_->begin_capture();
  allocator_->release_pool(pool);
  allocator_->trim({});
  EXPECT_EQ(calls(DriverCall::kFree), 0u);
  EXPECT_TRUE(gpu_.end_capture(b_.ref).ok());
  allocator_->end_capture();
  EXPECT_EQ(allocator_->trim({}).released, 20_MiB);
}

using PoolsDeathTest = PoolsTest;

TEST_F(PoolsDeathTest, AbortsOnAPoolThatDoesNotExist) {
  EXPECT_DEATH((void)try_alloc(1_MiB, a_, PoolId{77}), "does not exist");
  EXPECT_DEATH(allocator_->retain_pool(PoolId{77}), "does not exist");
  EXPECT_DEATH(allocator_->release_pool(PoolId{77}), "does not exist");
  const PoolId pool = allocator_->create_pool({});
  allocator_->release_pool(pool);
  EXPECT_DEATH(allocator_->release_pool(pool), "was released");
}

}  // namespace
}  // namespace gpumemx
