// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

class PoolsTest : public AllocatorTest {
 protected:
  PoolsTest() : AllocatorTest(device_of(4_GiB)) {}
  const StreamInfo a_ = permanent(main_);
  const StreamInfo b_ = new_stream();

  // A pool of a graph, allocated from and freed to on a stream that is gone before the capture ends, and
  // released. (torch captures the body of a conditional node on such a stream.)
  void free_in_a_body(const std::vector<Bytes>& sizes) {
    const PoolId pool = allocator_->create_pool({});
    gpu_.begin_capture(b_.ref, CaptureMode::kGlobal);
    allocator_->begin_capture();
    const StreamInfo body{gpu_.new_stream(), /*permanent=*/false, /*capturing=*/true};
    gpu_.begin_capture(body.ref, CaptureMode::kGlobal);
    for (const Bytes size : sizes) free(alloc(size, body, pool));
    EXPECT_TRUE(gpu_.end_capture(body.ref).ok());
    gpu_.destroy_stream(body.ref);
    EXPECT_TRUE(gpu_.end_capture(b_.ref).ok());
    allocator_->end_capture();
    allocator_->release_pool(pool);
  }
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

TEST_F(PoolsTest, CountsWhatEachPoolReserves) {
  const PoolId one = allocator_->create_pool({}), plain = allocator_->create_pool({.plain = true});
  free({alloc(64_MiB, a_, one), alloc(32_MiB, b_, one)});
  const DeviceAddr small = alloc(512_B, a_, plain);
  alloc(128_MiB);
  const auto reserved_in = [&](PoolId pool) { return allocator_->reserved_by_pool().at(pool); };
  EXPECT_EQ(allocator_->reserved_by_pool().size(), 2u);
  EXPECT_EQ(reserved_in(one).all().current, 96 << 20);
  EXPECT_EQ(reserved_in(one).part[StatArray::kLarge].current, 96 << 20);
  EXPECT_EQ(reserved_in(plain).part[StatArray::kSmall].current, 2 << 20);
  allocator_->release_pool(one);
  allocator_->trim({});
  EXPECT_EQ(reserved_in(one).all().current, 0);
  EXPECT_EQ(reserved_in(one).all().peak, 96 << 20);
  EXPECT_EQ(reserved_in(one).all().allocated, 96 << 20);
  EXPECT_EQ(reserved_in(one).all().freed(), 96 << 20);
  allocator_->reset_peaks();
  EXPECT_EQ(reserved_in(one).all().peak, 0);
  allocator_->reset_accumulated();
  EXPECT_FALSE(allocator_->reserved_by_pool().contains(one));
  EXPECT_EQ(reserved_in(plain).all().allocated, 0);
  EXPECT_EQ(reserved_in(plain).all().current, 2 << 20);
  free(small);
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

// Random programs, seed 2436: the pool's set stays for its live block, and that its other memory went
// was not noticed.
TEST_F(PoolsTest, ARequestTriesAgainWhenAReleasedPoolGaveUpAPart) {
  Options options;
  options.plain = true;
  start(options);
  gpu_.set_manual(true);
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr freed = alloc(1_GiB, a_, pool), live = alloc(1_GiB, a_, pool);
  gpu_.launch(main_, {writes({freed, 1_GiB}, 1)});
  free(freed);
  allocator_->release_pool(pool);
  alloc(1_GiB, a_);  // asks in vain, so that the next miss does not ask at first
  gpu_.complete_all();
  EXPECT_TRUE(try_alloc(1536_MiB, a_).ok());
  free(live);
  gpu_.set_manual(false);
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
  EXPECT_EQ(paths().harvested_loose, 8u);  // handles of 8 MiB
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
  EXPECT_EQ(paths().harvested_loose, 8u);
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

TEST_F(PoolsTest, AllPoolsAreOrdinaryDeviceMemoryWithTheSetting) {
  Options options;
  options.plain_pools = true;
  start(options);
  const DeviceAddr block = alloc(5_MiB, a_, allocator_->create_pool({}));
  EXPECT_EQ(allocator_->find_block(block)->heap, HeapKind::kPlainLarge);
  EXPECT_EQ(allocator_->find_block(alloc(5_MiB, a_))->heap, HeapKind::kRest);
}

TEST_F(PoolsTest, InfoSaysWhatStandsThereUntilAllIsGone) {
  EXPECT_FALSE(allocator_->pool_info(PoolId{77}));
  const PoolId pool = allocator_->create_pool({});
  EXPECT_EQ(allocator_->pool_info(pool)->reserved, 0_B);
  allocator_->retain_pool(pool);
  free(alloc(64_MiB, a_, pool));
  const DeviceAddr live = alloc(32_MiB, a_, pool);
  EXPECT_EQ(allocator_->pool_info(pool)->users, 2);
  EXPECT_EQ(allocator_->pool_info(pool)->reserved, 64_MiB);
  EXPECT_EQ(allocator_->pool_info(pool)->live, 32_MiB);
  allocator_->release_pool(pool);
  allocator_->release_pool(pool);
  allocator_->trim({.pool = pool});
  EXPECT_EQ(allocator_->pool_info(pool)->users, 0);
  EXPECT_EQ(allocator_->pool_info(pool)->live, 32_MiB);
  free(live);
  allocator_->trim({.pool = pool});
  EXPECT_FALSE(allocator_->pool_info(pool));
}

TEST_F(PoolsTest, InAWholePoolEachBlockIsAnAllocationOfItsOwn) {
  const PoolId pool = allocator_->create_pool({.whole = true});
  const DeviceAddr small = alloc(700_B, a_, pool);
  const DeviceAddr other = alloc(1_MiB, a_, pool);
  const DeviceAddr large = alloc(5_MiB, a_, pool);
  EXPECT_EQ(calls(DriverCall::kAllocate), 3u);
  EXPECT_EQ(allocator_->find_block(small)->size, 2_MiB);
  EXPECT_EQ(allocator_->find_block(small)->requested, 700_B);
  EXPECT_EQ(allocator_->find_block(large)->size, 6_MiB);
  free({other, large});
  EXPECT_EQ(alloc(900_KiB, a_, pool), other);
  EXPECT_EQ(alloc(3_MiB, a_, pool), large);  // all of it, not a part
  EXPECT_EQ(allocator_->find_block(large)->size, 6_MiB);
  EXPECT_EQ(calls(DriverCall::kAllocate), 3u);
}

TEST_F(PoolsTest, APoolBecomesWholeBeforeItsFirstBlockOrLater) {
  const PoolId pool = allocator_->create_pool({});
  alloc(3_MiB, a_, pool);
  allocator_->set_whole(pool);
  const DeviceAddr block = alloc(3_MiB, a_, pool);
  EXPECT_EQ(allocator_->find_block(block)->size, 4_MiB);
  EXPECT_EQ(allocator_->find_block(block)->segment, block);
}

TEST_F(PoolsTest, APoolThatBecomesPlainUsesWhatItHasAndMapsNoMore) {
  const PoolId pool = allocator_->create_pool({});
  const DeviceAddr mapped = alloc(40_MiB, a_, pool);
  const StreamInfo other = new_stream();
  alloc(30_MiB, other, pool);
  allocator_->set_plain(pool);
  free(mapped);
  gpu_.reset_meter();
  EXPECT_EQ(alloc(40_MiB, a_, pool), mapped);
  EXPECT_EQ(calls(DriverCall::kAllocate), 0u);
  for (const StreamInfo& stream : {a_, other, new_stream()}) {
    for (const Bytes size : {64_MiB, 3_MiB, 700_B}) {
      const DeviceAddr block = alloc(size, stream, pool);
      EXPECT_NE(allocator_->find_block(block)->segment, DeviceAddr{}) << size.n;
    }
  }
  EXPECT_EQ(calls(DriverCall::kMap), 0u);
  EXPECT_EQ(calls(DriverCall::kUnmap), 0u);
  alloc(64_MiB, a_);  // the default pool's memory is mapped as ever
  EXPECT_GT(calls(DriverCall::kMap), 0u);
}

// A third party's allocator: device memory of the simulated device, or none.
class ThirdParty final : public SegmentSource {
 public:
  explicit ThirdParty(SimDriver& gpu) : gpu_(gpu) {}
  Result<DeviceAddr> allocate(Bytes size) override {
    if (during) during();
    if (refuse) return Error{Errc::kOutOfMemory, size, "the third party has no more"};
    if (foreign.n != 0) return foreign;
    const auto got = gpu_.allocate(size);
    if (got.ok()) asked.push_back(size);
    return got;
  }
  void free(DeviceAddr address) override {
    EXPECT_TRUE(foreign.n != 0 || gpu_.free(address).ok());
    ++freed;
  }

  bool refuse = false;
  DeviceAddr foreign;
  std::function<void()> during;
  std::vector<Bytes> asked;
  int freed = 0;

 private:
  SimDriver& gpu_;
};

class SourcePoolsTest : public PoolsTest {
 protected:
  PoolId new_pool() { return allocator_->create_pool({.source = source_}); }
  const std::shared_ptr<ThirdParty> source_ = std::make_shared<ThirdParty>(gpu_);
};

TEST_F(SourcePoolsTest, BlocksAreCutFromTheSegmentsOfTheSource) {
  const PoolId pool = new_pool();
  const DeviceAddr one = alloc(1_MiB, a_, pool), two = alloc(1_MiB, a_, pool);
  EXPECT_EQ(two, one + 1_MiB);
  alloc(1_MiB, a_, pool);
  alloc(5_MiB, a_, pool);
  alloc(33_MiB, a_, pool);
  EXPECT_EQ(source_->asked, (std::vector<Bytes>{2_MiB, 2_MiB, 20_MiB, 34_MiB}));
  EXPECT_EQ(reserved(), 58_MiB);
  EXPECT_EQ(calls(DriverCall::kCreate), 0u);
  EXPECT_TRUE(allocator_->owns(one));
  free(two);
  EXPECT_EQ(alloc(1_MiB, a_, pool), two);
}

TEST_F(SourcePoolsTest, TheSourceAloneGetsThemBackWhenPoolAndBlocksAreGone) {
  const PoolId pool = new_pool();
  const DeviceAddr idle = alloc(5_MiB, a_, pool), live = alloc(33_MiB, a_, pool);
  free(idle);
  allocator_->trim({});
  EXPECT_EQ(source_->freed, 0);  // the pool is in use
  allocator_->release_pool(pool);
  allocator_->trim({.pool = pool});
  EXPECT_EQ(source_->freed, 1);
  free(live);  // it outlives its pool, and others go on
  alloc(30_MiB, a_);
  allocator_->trim({});
  EXPECT_EQ(source_->freed, 2);
  EXPECT_FALSE(allocator_->pool_info(pool));
}

TEST_F(SourcePoolsTest, TheSourceGetsThemWithTheNextMissToo) {
  const PoolId pool = new_pool();
  free(alloc(33_MiB, a_, pool));
  allocator_->release_pool(pool);
  alloc(30_MiB, a_);
  EXPECT_EQ(source_->freed, 1);
}

TEST_F(SourcePoolsTest, TheSourceGetsThemAtTheEndOfTheAllocatorToo) {
  alloc(33_MiB, a_, new_pool());
  allocator_.reset();
  EXPECT_EQ(source_->freed, 1);
}

TEST_F(SourcePoolsTest, MemoryGoesBackOnlyWhenItsWorkIsDone) {
  gpu_.set_manual(true);
  const PoolId pool = new_pool();
  const DeviceAddr block = alloc(33_MiB, a_, pool);
  gpu_.launch(main_, {writes({block, 33_MiB}, 1)});
  free(block);
  allocator_->release_pool(pool);
  allocator_->trim({.pool = pool, .wait = false});
  EXPECT_EQ(source_->freed, 0);
  allocator_->trim({.pool = pool});
  EXPECT_EQ(source_->freed, 1);
}

TEST_F(SourcePoolsTest, TheSourceMayUseTheAllocator) {
  source_->during = [&] { free(alloc(10_MiB, b_)); };  // no lock is held
  alloc(33_MiB, a_, new_pool());
  EXPECT_EQ(reserved(), 44_MiB);
}

TEST_F(SourcePoolsTest, WhatIsIdleElsewhereGoesBackBeforeTheRequestFails) {
  free(alloc(3584_MiB, a_));
  const PoolId pool = new_pool();
  alloc(2_GiB, a_, pool);
  EXPECT_EQ(reserved(), 2_GiB);
  EXPECT_EQ(stats().num_alloc_retries, 1u);
  const AllocResult too_much = try_alloc(3_GiB, a_, pool);
  ASSERT_FALSE(too_much.ok());
  EXPECT_EQ(too_much.failure->pool, pool);
  source_->refuse = true;
  const AllocResult refused = try_alloc(64_MiB, a_, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.failure->driver_said.find("the third party has no more"), std::string::npos);
}

TEST_F(SourcePoolsTest, TheCapHoldsForItsMemoryToo) {
  const PoolId pool = new_pool();
  allocator_->set_cap(80_MiB);
  alloc(40_MiB, a_, pool);
  free(alloc(30_MiB, a_));
  alloc(40_MiB, a_, pool);
  const AllocResult too_much = try_alloc(30_MiB, a_, pool);
  ASSERT_FALSE(too_much.ok());
  EXPECT_EQ(too_much.failure->cause, OomCause::kCapped);
  EXPECT_EQ(source_->asked.size(), 2u);
}

TEST_F(SourcePoolsTest, ASourceThatGivesMemoryOfTheAllocatorIsRefused) {
  source_->foreign = alloc(20_MiB, b_);
  const AllocResult got = try_alloc(5_MiB, a_, new_pool());
  ASSERT_FALSE(got.ok());
  EXPECT_NE(got.failure->driver_said.find("instead of its own"), std::string::npos);
  EXPECT_EQ(source_->freed, 1);
}

TEST_F(SourcePoolsTest, SegmentsAreNotSplitInAWholePool) {
  const PoolId pool = allocator_->create_pool({.whole = true, .source = source_});
  alloc(1_MiB, a_, pool);
  alloc(1_MiB, a_, pool);
  alloc(5_MiB, a_, pool);
  EXPECT_EQ(source_->asked, (std::vector<Bytes>{2_MiB, 2_MiB, 6_MiB}));
}

TEST_F(SourcePoolsTest, OnlyAPoolForTheCaseHelpsOutOfMemory) {
  const PoolId use = new_pool(), leave = new_pool();
  allocator_->set_use_on_oom(use, true);
  allocator_->set_cap(80_MiB);
  const DeviceAddr in_leave = alloc(40_MiB, a_, leave), in_use = alloc(40_MiB, a_, use);
  EXPECT_FALSE(try_alloc(40_MiB, a_).ok());
  free({in_leave, in_use});
  EXPECT_FALSE(try_alloc(30_MiB, b_).ok());  // what is ready in a pool is ready on its stream
  const DeviceAddr block = alloc(30_MiB, a_);
  EXPECT_EQ(block, in_use);
  EXPECT_EQ(allocator_->find_block(block)->pool, use);
  EXPECT_FALSE(try_alloc(30_MiB, a_).ok());
  free(block);
  EXPECT_EQ(alloc(20_MiB, a_, use), in_use);
  allocator_->set_use_on_oom(use, false);
  EXPECT_FALSE(try_alloc(10_MiB, a_).ok());
}

TEST_F(PoolsTest, AReleasedPoolIsNoneForTheCase) {
  const PoolId pool = allocator_->create_pool({});
  allocator_->set_use_on_oom(pool, true);
  const DeviceAddr block = alloc(64_MiB, a_, pool);
  allocator_->set_cap(64_MiB);
  allocator_->release_pool(pool);
  EXPECT_FALSE(try_alloc(32_MiB, a_).ok());
  free(block);
  EXPECT_EQ(allocator_->find_block(alloc(32_MiB, a_))->pool, kDefaultPool);
}

// --- checkpoints

class CheckpointTest : public PoolsTest {
 protected:
  std::vector<DeviceAddr> live() const {
    std::vector<DeviceAddr> out;
    for (const auto& b : allocator_->checkpoint_pool(pool_).live) out.push_back(b.address);
    return out;
  }
  RestoredPool restore(const PoolCheckpoint& checkpoint) {
    auto restored = allocator_->restore_pool(checkpoint);
    EXPECT_TRUE(restored.ok()) << (restored.ok() ? "" : restored.error().where);
    EXPECT_EQ(allocator_->validate().value_or(""), "");
    return restored.ok() ? std::move(restored).take() : RestoredPool{};
  }
  static std::vector<DeviceAddr> sorted(std::vector<DeviceAddr> all) {
    std::sort(all.begin(), all.end());
    return all;
  }
  const PoolId pool_ = allocator_->create_pool({});
};

TEST_F(CheckpointTest, MakesExactlyTheSameBlocksLiveAgain) {
  const DeviceAddr a = alloc(3_MiB, a_, pool_), b = alloc(700_B, a_, pool_),
                   c = alloc(64_MiB, b_, pool_), d = alloc(5_MiB, a_, pool_);
  free(d);
  const PoolCheckpoint then = allocator_->checkpoint_pool(pool_);
  const Bytes live_then = allocator_->pool_info(pool_)->live;
  const auto requested_then = four(stats().requested_bytes).current;
  free({a, c});
  const DeviceAddr e = alloc(64_MiB + 512_B, b_, pool_), f = alloc(1_MiB, a_, pool_);
  const DeviceAddr outside = alloc(20_MiB, a_);
  gpu_.reset_meter();

  const RestoredPool restored = restore(then);
  EXPECT_EQ(sorted(restored.freed), sorted({b, e, f}));
  EXPECT_EQ(sorted(restored.allocated), sorted({a, b, c}));
  EXPECT_EQ(live(), sorted({a, b, c}));
  EXPECT_EQ(allocator_->pool_info(pool_)->live, live_then);
  EXPECT_EQ(four(stats().requested_bytes).current, requested_then + n(20_MiB));
  EXPECT_EQ(mapping_calls(), 0u);  // a graph that was captured meanwhile has the same addresses
  const DeviceAddr next = alloc(5_MiB, a_, pool_);
  for (const DeviceAddr address : {a, b, c}) EXPECT_NE(next, address);
  free({a, b, c, next, outside});
}

TEST_F(CheckpointTest, RestoresAnEmptyPoolAndTheSameAgain) {
  const PoolCheckpoint empty = allocator_->checkpoint_pool(pool_);
  const DeviceAddr a = alloc(3_MiB, a_, pool_), b = alloc(3_MiB, a_, pool_);
  const PoolCheckpoint two = allocator_->checkpoint_pool(pool_);
  EXPECT_EQ(sorted(restore(empty).freed), sorted({a, b}));
  EXPECT_EQ(live(), std::vector<DeviceAddr>{});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(restore(two).allocated, sorted({a, b}));
  EXPECT_EQ(sorted(live()), sorted({a, b}));
  EXPECT_TRUE(restore(empty).allocated.empty());
}

TEST_F(CheckpointTest, ABlockOfAnotherSizeAtTheAddressIsReplaced) {
  const DeviceAddr a = alloc(6_MiB, a_, pool_);
  const PoolCheckpoint then = allocator_->checkpoint_pool(pool_);
  free(a);
  const DeviceAddr half = alloc(4_MiB, a_, pool_), rest = alloc(2_MiB, a_, pool_);
  EXPECT_EQ(std::min(half, rest), a);
  restore(then);
  EXPECT_EQ(live(), std::vector<DeviceAddr>{a});
  EXPECT_EQ(allocator_->find_block(a)->size, 6_MiB);
}

TEST_F(CheckpointTest, OneThatIsLiveThroughoutKeepsItsRecordedStreams) {
  gpu_.set_manual(true);
  const DeviceAddr a = alloc(30_MiB, a_, pool_);
  ASSERT_TRUE(allocator_->record_stream(a, b_));
  gpu_.launch(b_.ref, {writes({a, 30_MiB}, 3)});
  restore(allocator_->checkpoint_pool(pool_));
  free(a);
  EXPECT_NE(alloc(30_MiB, a_, pool_), a);  // b_ still writes to it
  gpu_.complete_all();
  gpu_.set_manual(false);
}

TEST_F(CheckpointTest, WaitsForStreamsThatStillUseWhatIsInTheWay) {
  gpu_.set_manual(true);
  const DeviceAddr a = alloc(30_MiB, a_, pool_);
  const PoolCheckpoint then = allocator_->checkpoint_pool(pool_);
  free(a);
  const DeviceAddr other = alloc(16_MiB, a_, pool_);
  ASSERT_EQ(other, a);
  ASSERT_TRUE(allocator_->record_stream(other, b_));
  gpu_.launch(b_.ref, {writes({other, 16_MiB}, 3)});
  restore(then);
  EXPECT_EQ(gpu_.queued(b_.ref), 0u);
  EXPECT_EQ(live(), std::vector<DeviceAddr>{a});
  gpu_.set_manual(false);
}

TEST_F(CheckpointTest, InACaptureNothingIsWaitedFor) {
  gpu_.set_manual(true);
  const DeviceAddr a = alloc(30_MiB, a_, pool_);
  const PoolCheckpoint then = allocator_->checkpoint_pool(pool_);
  ASSERT_TRUE(allocator_->record_stream(a, b_));
  gpu_.launch(b_.ref, {writes({a, 30_MiB}, 3)});
  free(a);
  allocator_->begin_capture();
  const auto restored = allocator_->restore_pool(then);
  ASSERT_FALSE(restored.ok());
  EXPECT_EQ(restored.error().code, Errc::kCaptureActive);
  allocator_->end_capture();
  restore(then);
  gpu_.set_manual(false);
}

TEST_F(CheckpointTest, OneOfMemoryThatIsGoneIsRefusedWithoutAnEffect) {
  free(alloc(3_MiB, a_, pool_));
  PoolCheckpoint stale = allocator_->checkpoint_pool(pool_);
  const DeviceAddr kept = alloc(1_MiB, a_, pool_);
  const DeviceAddr elsewhere = alloc(20_MiB, a_);
  stale.live.push_back({elsewhere, 20_MiB, 20_MiB});
  const auto restored = allocator_->restore_pool(stale);
  ASSERT_FALSE(restored.ok());
  EXPECT_EQ(restored.error().code, Errc::kInvalidArgument);
  stale.live[0] = {DeviceAddr{0x1234}, 512_B, 1_B};
  EXPECT_FALSE(allocator_->restore_pool(stale).ok());
  EXPECT_EQ(live(), std::vector<DeviceAddr>{kept});
}

TEST_F(CheckpointTest, WorksInPlainPoolsToo) {
  const PoolId plain = allocator_->create_pool({.plain = true});
  const DeviceAddr a = alloc(3_MiB, a_, plain), b = alloc(4_MiB, a_, plain);
  const PoolCheckpoint then = allocator_->checkpoint_pool(plain);
  free({a, b});
  alloc(7_MiB, a_, plain);
  restore(then);
  EXPECT_EQ(allocator_->find_block(a)->size, 3_MiB);
  EXPECT_EQ(allocator_->find_block(b)->size, 4_MiB);
}

// --- captures

TEST_F(PoolsTest, AStreamThatIsGoneBeforeItsCaptureEndsIsNotTouchedAgain) {
  free_in_a_body({20_MiB, 700_B});
  allocator_->trim({});
  EXPECT_EQ(reserved(), 0_B);
}

// Random programs, seed 2802: of such a stream nothing is ever heard again, so a mapping of its time that
// the driver did not unmap at first kept its memory for good.
TEST_F(PoolsTest, MemoryOfAStreamThatIsGoneIsReleasedAlsoAfterAFailedUnmap) {
  free_in_a_body({20_MiB});
  gpu_.fail_nth(DriverCall::kUnmap, 1);
  allocator_->trim({});
  EXPECT_EQ(gpu_.faults_fired(), 1u);
  allocator_->trim({});
  EXPECT_EQ(reserved(), 0_B);
}

TEST_F(PoolsTest, ARecordedStreamThatCapturesHoldsABlockUntilTheCaptureEnds) {
  const PoolId pool = allocator_->create_pool({});
  const StreamInfo c = new_stream();
  const DeviceAddr block = alloc(20_MiB, b_, pool);
  gpu_.begin_capture(b_.ref, CaptureMode::kGlobal);
  gpu_.begin_capture(c.ref, CaptureMode::kGlobal);  // in torch's graphs, one forked from the other
  allocator_->begin_capture();
  ASSERT_TRUE(allocator_->record_stream(block, c));
  free(block);
  const DeviceAddr other = alloc(20_MiB, b_, pool);
  EXPECT_NE(other, block);
  EXPECT_TRUE(gpu_.end_capture(c.ref).ok());
  EXPECT_TRUE(gpu_.end_capture(b_.ref).ok());
  allocator_->end_capture();
  EXPECT_EQ(alloc(20_MiB, b_, pool), block);
}

TEST_F(PoolsTest, WhatIsFreedInACaptureStaysWhereItIsUntilTheCacheIsEmptied) {
  const PoolId first = allocator_->create_pool({}), second = allocator_->create_pool({});
  const DeviceAddr output = alloc(64_MiB, b_, first);
  allocator_->release_pool(first);
  gpu_.begin_capture(b_.ref, CaptureMode::kGlobal);
  allocator_->begin_capture();
  gpu_.launch(b_.ref, {writes({output, 64_MiB}, 7)});
  gpu_.launch(b_.ref, {reads({output, 64_MiB}, 7)});
  free(output);
  const auto graph = gpu_.end_capture(b_.ref);
  ASSERT_TRUE(graph.ok());
  allocator_->end_capture();
  alloc(64_MiB, b_);  // not there
  EXPECT_EQ(reserved(), 128_MiB);
  gpu_.replay_graph(graph.value(), b_.ref);
  gpu_.complete_all();
  allocator_->trim({});
  EXPECT_EQ(reserved(), 64_MiB);
  allocator_->release_pool(second);
}

TEST_F(PoolsTest, WhatIsFreedInACaptureGoesWhenMemoryIsShortOrNoPoolIsLeft) {
  for (const bool is_short : {true, false}) {
    const PoolId pool = allocator_->create_pool({}), before = allocator_->create_pool({});
    const DeviceAddr input = alloc(2_GiB, a_, before);
    allocator_->release_pool(before);
    allocator_->begin_capture();
    free(input);
    allocator_->end_capture();
    if (!is_short) allocator_->release_pool(pool);
    const DeviceAddr block = alloc(is_short ? 3_GiB : 2_GiB, b_);
    EXPECT_LE(reserved(), 3_GiB);
    free(block);
    if (is_short) allocator_->release_pool(pool);
    allocator_->trim({});
  }
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
