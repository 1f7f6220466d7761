// SPDX-License-Identifier: BSD-3-Clause
//
// What a request does when no memory is ready for it: grows, is undone when the driver fails, goes on
// in plain mode, or ends in a verdict whose figures add up.
#include <gtest/gtest.h>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

class MissTest : public AllocatorTest {
 protected:
  MissTest() : AllocatorTest(device_of(4_GiB)) {}
  const StreamInfo b_ = new_stream();
};

class LargeDeviceTest : public AllocatorTest {
 protected:
  LargeDeviceTest() : AllocatorTest(device_of(128_GiB)) {}
};

TEST_F(LargeDeviceTest, ANewBlockTakesAQuarterOfItsSizeInHandles) {
  alloc(256_MiB);
  EXPECT_EQ(paths().created, 4u);
  EXPECT_EQ(reserved(), 256_MiB);
  EXPECT_EQ(paths().misses, 1u);
  EXPECT_EQ(paths().holes, 0u);
  EXPECT_EQ(calls(DriverCall::kCreate), 4u);
  EXPECT_EQ(calls(DriverCall::kMap), 4u);
  EXPECT_EQ(calls(DriverCall::kSetAccess), 4u);
}

TEST_F(MissTest, OnASmallDeviceHandlesAreSmall) {
  alloc(256_MiB);
  EXPECT_EQ(paths().created, 32u);
}

TEST_F(LargeDeviceTest, WeightsThatAreLaidOutOneAfterTheOtherShareHandles) {
  alloc_many(32, 8_MiB);
  EXPECT_EQ(paths().created, 32u);
  alloc_many(4, 8_MiB);  // 256 MiB in a row: two in a handle from here on
  EXPECT_EQ(paths().created, 34u);
  EXPECT_EQ(reserved(), 288_MiB);
  alloc_many(30, 8_MiB);  // from 512 MiB on four
  EXPECT_EQ(paths().created, 34u + 14u + 1u);
  EXPECT_EQ(reserved(), 544_MiB);
}

TEST_F(LargeDeviceTest, AStreakEndsWhereMemoryIsUsedAgain) {
  const auto blocks = alloc_many(32, 8_MiB);
  free(alloc(9_MiB));
  alloc(8_MiB);  // takes what the larger one had
  EXPECT_EQ(paths().harvested_own, 1u);
  alloc(8_MiB);
  EXPECT_EQ(reserved(), 272_MiB);
  alloc(8_MiB);  // a new streak: a handle of its own
  EXPECT_EQ(reserved(), 280_MiB);
  free(blocks);
}

TEST_F(MissTest, AHoleBetweenLiveBlocksIsFilledAgain) {
  Options options;
  options.max_aliases = 1;  // where memory leaves, nothing stays mapped
  start(options);
  const auto blocks = alloc_many(3, 64_MiB);
  free(blocks[1]);
  alloc(64_MiB, b_);  // takes the memory of the one in the middle ...
  EXPECT_EQ(reserved(), 192_MiB);
  EXPECT_EQ(alloc(64_MiB), blocks[1]);  // ... whose addresses are used again
  EXPECT_EQ(paths().holes, 1u);
}

TEST_F(MissTest, NeverAsksForMoreThanFitsUnderTheCap) {
  allocator_->set_cap(101_MiB);  // no whole number of pages
  alloc(60_MiB);
  alloc(40_MiB);
  EXPECT_EQ(reserved(), 100_MiB);
  EXPECT_FALSE(try_alloc(2_MiB).ok());
  EXPECT_EQ(reserved(), 100_MiB);
}

TEST_F(MissTest, ACapBelowWhatIsReservedStopsGrowthButNotReuse) {
  const DeviceAddr a = alloc(64_MiB);
  alloc(64_MiB);
  allocator_->set_cap(32_MiB);
  EXPECT_EQ(allocator_->cap(), 32_MiB);
  free(a);
  EXPECT_EQ(alloc(64_MiB), a);
  free(a);
  alloc(64_MiB - 512_KiB);  // moves
  EXPECT_EQ(reserved(), 128_MiB);
  EXPECT_FALSE(try_alloc(512_B).ok() && reserved() > 128_MiB);
}

TEST_F(MissTest, MemoryOfOthersThatCameBackIsUsed) {
  gpu_.occupy(3_GiB);
  alloc(1_GiB);
  ASSERT_FALSE(try_alloc(1_GiB).ok());
  gpu_.occupy(0_B);
  alloc(2_GiB);
}

TEST_F(MissTest, PlainModeByOptionMakesOrdinaryAllocationsOnly) {
  Options options;
  options.plain = true;
  start(options);
  EXPECT_TRUE(allocator_->plain_mode());
  const DeviceAddr small = alloc(512_B);
  const DeviceAddr middle = alloc(3_MiB);
  const DeviceAddr large = alloc(21_MiB);
  EXPECT_EQ(reserved(), 44_MiB);  // 2 + 20 + 22
  EXPECT_EQ(calls(DriverCall::kAllocate), 3u);
  EXPECT_EQ(calls(DriverCall::kReserve) + mapping_calls(), 0u);
  EXPECT_EQ(stats().segment.all().current, 3);
  EXPECT_EQ(stats().segment.part[StatArray::kSmall].current, 1);
  EXPECT_EQ(alloc(4_MiB), middle + 3_MiB);
  free({small, middle, large});
}

class NoVirtualMemoryTest : public AllocatorTest {
 protected:
  static SimOptions device() {
    SimOptions options = device_of(1_GiB);
    options.virtual_memory = false;
    return options;
  }
  NoVirtualMemoryTest() : AllocatorTest(device()) {}
};

TEST_F(NoVirtualMemoryTest, ADeviceWithoutItIsServedInPlainMode) {
  EXPECT_TRUE(allocator_->plain_mode());
  const DeviceAddr a = alloc(600_MiB);
  free(a);
  EXPECT_EQ(alloc(600_MiB), a);
  free(a);
  alloc(700_MiB);  // the cached segment goes back first
  EXPECT_EQ(reserved(), 700_MiB);
  EXPECT_EQ(stats().num_alloc_retries, 1u);
  EXPECT_EQ(stats().num_device_free, 1u);
}

TEST_F(NoVirtualMemoryTest, NearTheEndASegmentIsNoLargerThanItHasToBe) {
  alloc(1_GiB - 6_MiB);
  alloc(3_MiB);  // not 20 MiB
  EXPECT_EQ(reserved(), 1_GiB - 2_MiB);
}

TEST_F(NoVirtualMemoryTest, ACapHoldsInPlainModeToo) {
  allocator_->set_cap(100_MiB);
  const DeviceAddr a = alloc(60_MiB);
  const AllocResult refused = try_alloc(60_MiB);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.failure->cause, OomCause::kCapped);
  free(a);
  alloc(80_MiB);
  EXPECT_EQ(reserved(), 80_MiB);
}

TEST_F(NoVirtualMemoryTest, ACachedSegmentIsKeptDuringACapture) {
  free(alloc(600_MiB));
  const StreamRef s = gpu_.new_stream();
  gpu_.begin_capture(s, CaptureMode::kGlobal);
  allocator_->begin_capture();
  const AllocResult refused = try_alloc(700_MiB);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.failure->cause, OomCause::kDuringCapture);
  EXPECT_EQ(calls(DriverCall::kFree), 0u);
  EXPECT_TRUE(gpu_.end_capture(s).ok());
  allocator_->end_capture();
  alloc(700_MiB);
}

// A failed driver call: the request is tried at another place or in another way, the books and the
// device stay in step.

TEST_F(MissTest, AMapThatFailsOnceIsTriedAgainWithTheSameMemory) {
  gpu_.fail_nth(DriverCall::kMap, 1);
  alloc(8_MiB);
  EXPECT_EQ(paths().rollbacks, 1u);
  EXPECT_EQ(paths().created, 1u);
  EXPECT_EQ(paths().harvested_loose, 1u);
  EXPECT_EQ(reserved(), 8_MiB);
  EXPECT_FALSE(allocator_->plain_mode());
}

TEST_F(MissTest, SetAccessThatFailsOnceLeavesNoMappingBehind) {
  gpu_.fail_nth(DriverCall::kSetAccess, 2);
  alloc(32_MiB);
  EXPECT_EQ(paths().rollbacks, 1u);
  EXPECT_EQ(gpu_.mapping_count(), gpu_.handle_count());
  EXPECT_EQ(reserved(), 32_MiB);
}

TEST_F(MissTest, MemoryThatWasMappedBeforeAFailureServesTheNextTry) {
  gpu_.fail_nth(DriverCall::kMap, 3);
  alloc(32_MiB);  // four handles of 8 MiB
  EXPECT_EQ(calls(DriverCall::kCreate), 4u);
  EXPECT_EQ(reserved(), 32_MiB);
}

TEST_F(MissTest, AnUnmapThatFailsPutsTheAliasBack) {
  // Without aliases every move has to unmap.
  Options options;
  options.max_aliases = 1;
  start(options);
  free(alloc(64_MiB));
  gpu_.fail_nth(DriverCall::kUnmap, 2);
  alloc(64_MiB - 512_KiB);
  EXPECT_GE(paths().rollbacks, 1u);
  EXPECT_EQ(allocator_->validate().value_or(""), "");
  EXPECT_EQ(reserved(), 64_MiB);
}

TEST_F(MissTest, AReleaseThatFailsPutsTheReplacedHandleBack) {
  free(alloc(64_MiB));
  gpu_.fail_nth(DriverCall::kRelease, 1);
  alloc(1_MiB);
  EXPECT_EQ(paths().rollbacks, 1u);
  EXPECT_EQ(allocator_->validate().value_or(""), "");
  EXPECT_EQ(gpu_.reserved_bytes(), reserved());
}

TEST_F(MissTest, WhenMappingNeverWorksRequestsAreServedInPlainMode) {
  gpu_.fail_always(DriverCall::kMap);
  for (int i = 1; i <= 6; ++i) {
    EXPECT_FALSE(allocator_->plain_mode());
    alloc(30_MiB);
    EXPECT_EQ(paths().plain_segments, static_cast<std::uint64_t>(i));
  }
  EXPECT_TRUE(allocator_->plain_mode());
  gpu_.reset_meter();
  alloc(30_MiB);
  EXPECT_EQ(mapping_calls(), 0u);
  EXPECT_EQ(gpu_.mapping_count(), 0u);
}

TEST_F(MissTest, AMappingThatWorksAgainKeepsVirtualMode) {
  for (int i = 0; i < 20; ++i) {
    gpu_.fail_always(DriverCall::kSetAccess);
    alloc(30_MiB);
    gpu_.clear_failures();
    alloc(30_MiB, b_);
  }
  EXPECT_FALSE(allocator_->plain_mode());
}

// Verdicts. Every one of them adds up to the byte.

class OomTest : public MissTest {
 protected:
  OomVerdict fails(Bytes size, const StreamInfo& stream, PoolId pool = kDefaultPool) {
    const std::uint64_t before = stats().num_ooms;
    const AllocResult got = try_alloc(size, stream, pool);
    EXPECT_FALSE(got.ok());
    if (got.ok()) return {};
    EXPECT_EQ(stats().num_ooms, before + 1);
    const OomVerdict& v = *got.failure;
    EXPECT_EQ(v.reserved, v.live + v.pending + v.held + v.idle_pending + v.idle_private + v.idle);
    if (v.device_known) {
      EXPECT_EQ(v.device_total, v.reserved + v.others + v.device_free);
    }
    EXPECT_EQ(v.reserved, gpu_.reserved_bytes());
    EXPECT_EQ(v.requested, size);
    EXPECT_EQ(v.block, block_size(size));
    EXPECT_EQ(v.stream, stream.ref);
    EXPECT_EQ(v.pool, pool);
    EXPECT_EQ(allocator_->validate().value_or(""), "");
    return v;
  }
  OomVerdict fails(Bytes size) { return fails(size, permanent(main_)); }
};

TEST_F(OomTest, FullWhenLiveMemoryFillsTheDevice) {
  alloc(3_GiB);
  const OomVerdict v = fails(2_GiB + 1_B);
  EXPECT_EQ(v.cause, OomCause::kFull);
  EXPECT_EQ(v.live, 3_GiB);
  EXPECT_EQ(v.device_total, 4_GiB);
  EXPECT_EQ(v.others, 0_B);
  EXPECT_EQ(v.cap, Bytes{~0ull});
  EXPECT_EQ(v.driver_said.empty(), v.device_free.n == (1_GiB).n);
  free(alloc(1_GiB));  // what was got before the failure is of use
}

TEST_F(OomTest, FragmentedWhenFreeMemorySharesHandlesWithWhatIsInUse) {
  allocator_.reset();
  SimDriver small(device_of(64_MiB));
  DeviceAllocator allocator(small, {});
  const StreamInfo stream = permanent(small.default_stream());
  std::vector<DeviceAddr> blocks;
  for (int i = 0; i < 64; ++i) {
    blocks.push_back(allocator.allocate({1_MiB, stream, {}, 0, nullptr}).address);
  }
  for (std::size_t i = 0; i < 64; i += 2) allocator.free(blocks[i]);
  const AllocResult got = allocator.allocate({16_MiB, stream, {}, 0, nullptr});
  ASSERT_FALSE(got.ok());
  const OomVerdict& v = *got.failure;
  EXPECT_EQ(v.cause, OomCause::kFragmented);
  EXPECT_EQ(v.live, 32_MiB);
  EXPECT_EQ(v.held, 32_MiB);
  EXPECT_EQ(v.idle + v.idle_pending + v.idle_private + v.pending, 0_B);
  EXPECT_EQ(v.largest_free, 1_MiB);
  EXPECT_EQ(v.device_free, 0_B);
  EXPECT_EQ(v.device_total, v.reserved + v.others + v.device_free);
}

TEST_F(OomTest, CappedWhenTheCapAndNotTheDeviceIsReached) {
  allocator_->set_cap(1_GiB);
  alloc(1000_MiB);
  const OomVerdict v = fails(64_MiB);
  EXPECT_EQ(v.cause, OomCause::kCapped);
  EXPECT_EQ(v.cap, 1_GiB);
  EXPECT_EQ(v.reserved, 1000_MiB);
  EXPECT_EQ(v.device_free, 4_GiB - 1000_MiB);
}

TEST_F(OomTest, CappedAlsoDuringACaptureWhenNothingCouldBeFreed) {
  allocator_->set_cap(1_GiB);
  alloc(1000_MiB);
  allocator_->begin_capture();
  EXPECT_EQ(fails(64_MiB).cause, OomCause::kCapped);
  allocator_->end_capture();
}

TEST_F(OomTest, CappedAlsoWhenTheDeviceCannotBeAsked) {
  allocator_->set_cap(1_GiB);
  alloc(1000_MiB);
  gpu_.fail_always(DriverCall::kMemory);
  const OomVerdict v = fails(64_MiB);
  EXPECT_EQ(v.cause, OomCause::kCapped);
  EXPECT_FALSE(v.device_known);
  EXPECT_EQ(v.device_total + v.device_free + v.others, 0_B);
}

TEST_F(OomTest, OtherUsersWhenTheyHoldWhatIsMissing) {
  alloc(768_MiB);
  gpu_.occupy(3_GiB);
  const OomVerdict v = fails(2_GiB);
  EXPECT_EQ(v.cause, OomCause::kOtherUsers);
  EXPECT_EQ(v.others, 3_GiB);
  EXPECT_EQ(v.live, 768_MiB);
  EXPECT_EQ(v.idle + v.device_free, 256_MiB);
  EXPECT_NE(v.driver_said.find("out of memory"), std::string::npos);
}

TEST_F(OomTest, HeldByPoolsWhenPrivatePoolsHoldWhatIsMissing) {
  const PoolId pool = allocator_->create_pool({});
  free(alloc(3_GiB, b_, pool));
  const OomVerdict v = fails(2_GiB);
  EXPECT_EQ(v.cause, OomCause::kHeldByPools);
  EXPECT_EQ(v.idle_private, 3_GiB);
  EXPECT_EQ(v.in_private_pools, 3_GiB);
  EXPECT_EQ(v.largest_free, 3_GiB);
}

TEST_F(OomTest, NonsenseWhenTheDeviceNeverHadThatMuch) {
  const OomVerdict v = fails(4_GiB + 1_B);
  EXPECT_EQ(v.cause, OomCause::kNonsenseSize);
  EXPECT_EQ(v.reserved, gpu_.reserved_bytes());
}

TEST_F(OomTest, NonsenseByItselfWhenTheDeviceCannotBeAsked) {
  gpu_.fail_always(DriverCall::kMemory);
  EXPECT_EQ(fails({(1ull << 60) + 512}).cause, OomCause::kNonsenseSize);
}

TEST_F(OomTest, DuringCaptureWhenWaitingWouldHaveHelped) {
  gpu_.set_manual(true);
  const DeviceAddr a = alloc(4_GiB);
  gpu_.launch(main_, {writes({a, 4_GiB}, 1)});
  free(a);
  gpu_.begin_capture(b_.ref, CaptureMode::kGlobal);
  allocator_->begin_capture();
  const OomVerdict v = fails(1_GiB, b_);
  EXPECT_EQ(v.cause, OomCause::kDuringCapture);
  EXPECT_EQ(v.idle_pending, 4_GiB);
  EXPECT_EQ(gpu_.waits(), 0u);
  EXPECT_TRUE(gpu_.end_capture(b_.ref).ok());
  allocator_->end_capture();
  alloc(1_GiB, b_);
  gpu_.set_manual(false);
}

TEST_F(OomTest, RefusedByTheDriverWhenItHasEnoughAndSaysNo) {
  gpu_.fail_always(DriverCall::kCreate);
  const OomVerdict v = fails(1_GiB);
  EXPECT_EQ(v.cause, OomCause::kDriverRefused);
  EXPECT_EQ(v.device_free, 4_GiB);
  EXPECT_EQ(v.reserved, 0_B);
  EXPECT_NE(v.driver_said, "");
  gpu_.clear_failures();
  alloc(1_GiB);
}

TEST_F(OomTest, ShuttingDownWhenTheDriverSaysSo) {
  gpu_.shut_down();
  const AllocResult got = try_alloc(1_GiB);
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.failure->cause, OomCause::kShuttingDown);
  EXPECT_EQ(got.failure->reserved, 0_B);
  allocator_->shut_down();
  allocator_.reset();
}

TEST_F(OomTest, PendingBlocksAreApartFromWhatIsLive) {
  gpu_.set_manual(true);
  const DeviceAddr a = alloc(1_GiB);
  allocator_->record_stream(a, b_);
  free(a);
  alloc(2_GiB);
  gpu_.fail_always(DriverCall::kWait);
  const OomVerdict v = fails(2_GiB);
  EXPECT_EQ(v.cause, OomCause::kPendingOnStreams);
  EXPECT_EQ(v.live, 2_GiB);
  EXPECT_EQ(v.pending, 1_GiB);
  gpu_.clear_failures();
  gpu_.complete_all();
  gpu_.set_manual(false);
}

class FewAddressesTest : public AllocatorTest {
 protected:
  static SimOptions device() {
    SimOptions options = device_of(16_GiB);
    options.address_space = 4_GiB;
    return options;
  }
  FewAddressesTest() : AllocatorTest(device()) { alloc_many(2, 2_GiB); }
};

TEST_F(FewAddressesTest, OrdinaryAllocationsServeWhenAddressesHaveRunOut) {
  alloc(2_GiB);  // of a heap that has addresses, but no more ...
  alloc(1_MiB);  // ... and of one that never had any
  EXPECT_EQ(paths().plain_segments, 2u);
  EXPECT_EQ(reserved(), 6_GiB + 2_MiB);
  EXPECT_FALSE(allocator_->plain_mode());
}

TEST_F(FewAddressesTest, WhenThoseAreNotAllowedEitherTheVerdictNamesTheAddresses) {
  allocator_->set_cap(5_GiB);
  const AllocResult got = try_alloc(2_GiB);
  ASSERT_FALSE(got.ok());
  EXPECT_NE(got.failure->driver_said.find("address space"), std::string::npos);
}

TEST_F(MissTest, PlainMemoryIsHadThoughTheDeviceHasLessThanWasKnown) {
  Options options;
  options.tight_from = 1;  // so the device is not asked before every miss
  options.big_handle = options.big_handle_max = 2_MiB;
  start(options);
  const PoolId pool = allocator_->create_pool({.plain = true});
  free(alloc(4_GiB - 4_MiB));  // idle memory of the other kind
  gpu_.occupy(4_MiB);          // to what is known, giving back 2 MiB would do
  const AllocResult got = try_alloc(6_MiB, permanent(main_), pool);
  EXPECT_TRUE(got.ok()) << (got.ok() ? "" : got.failure->text());
  if (got.ok()) free(got.address);
  allocator_->release_pool(pool);
}

}  // namespace
}  // namespace gpumemx
