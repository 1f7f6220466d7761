// SPDX-License-Identifier: BSD-3-Clause
//
// The allocator as its callers see it: addresses, figures to the byte, history, misuse. Misses and
// out of memory: miss_test.cpp; streams: completion_test.cpp; aliases: handles_test.cpp.
#include "core/allocator.hpp"

#include <gtest/gtest.h>

#include "support/contexts.hpp"
#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

constexpr auto kSmall = StatArray::kSmall;
constexpr auto kLarge = StatArray::kLarge;

TEST_F(AllocatorTest, TakesNoMemoryBeforeTheFirstRequest) {
  EXPECT_EQ(gpu_.reserved_bytes(), 0_B);
  EXPECT_FALSE(allocator_->plain_mode());
  EXPECT_EQ(allocator_->cap(), Bytes{~0ull});
  EXPECT_FALSE(allocator_->maintain());
}

TEST_F(AllocatorTest, GivesBlocksOfWholeGranulesThatDoNotOverlap) {
  const AllocResult a = try_alloc(1000_B), b = try_alloc(1_B), c = try_alloc(3_MiB + 1_B);
  ASSERT_TRUE(a.ok() && b.ok() && c.ok());
  EXPECT_EQ(a.size, 1024_B);
  EXPECT_EQ(b.size, 512_B);
  EXPECT_EQ(c.size, 3_MiB + 512_B);
  EXPECT_EQ(a.address.n % 512, 0u);
  EXPECT_FALSE((AddrRange{a.address, a.size}.overlaps({b.address, b.size})));
}

TEST_F(AllocatorTest, ARequestOfNothingTakesOneGranule) {
  const AllocResult got = try_alloc(0_B);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got.size, 512_B);
  EXPECT_EQ(stats().allocated_bytes.all().current, 512);
  EXPECT_EQ(stats().requested_bytes.all().current, 0);
  free(got.address);
}

TEST_F(AllocatorTest, WholePagesAreAlignedToPages) {
  alloc(3_MiB);
  EXPECT_EQ(alloc(6_MiB).n % kPage.n, 0u);
  EXPECT_EQ(alloc(2_MiB).n % kPage.n, 0u);
}

TEST_F(AllocatorTest, AFreedBlockServesTheNextRequestOfItsSizeWithoutADriverCall) {
  const DeviceAddr a = alloc(5_MiB);
  gpu_.set_manual(true);  // not even the stream's progress is needed
  free(a);
  gpu_.reset_meter();
  EXPECT_EQ(alloc(5_MiB), a);
  EXPECT_EQ(gpu_.meter().seconds, 0);
  EXPECT_EQ(paths().hits, 1u);
  EXPECT_EQ(paths().misses, 1u);
  gpu_.set_manual(false);
}

TEST_F(AllocatorTest, EveryFigureIsExactThroughAScript) {
  const DeviceAddr small = alloc(1000_B);       // 1,024 in a small handle of 2 MiB
  const DeviceAddr large = alloc(3_MiB + 1_B);  // 3 MiB + 512 in a handle of 8 MiB
  Stats s = stats();
  EXPECT_EQ(four(s.allocation), (Four{2, 2, 2, 0}));
  EXPECT_EQ(four(s.allocation, kSmall), (Four{1, 1, 1, 0}));
  EXPECT_EQ(four(s.allocation, kLarge), (Four{1, 1, 1, 0}));
  EXPECT_EQ(four(s.active), (Four{2, 2, 2, 0}));
  EXPECT_EQ(four(s.allocated_bytes), (Four{3147264, 3147264, 3147264, 0}));
  EXPECT_EQ(four(s.allocated_bytes, kSmall), (Four{1024, 1024, 1024, 0}));
  EXPECT_EQ(four(s.allocated_bytes, kLarge), (Four{3146240, 3146240, 3146240, 0}));
  EXPECT_EQ(four(s.active_bytes), four(s.allocated_bytes));
  EXPECT_EQ(four(s.requested_bytes), (Four{3146729, 3146729, 3146729, 0}));
  EXPECT_EQ(four(s.requested_bytes, kSmall), (Four{1000, 1000, 1000, 0}));
  EXPECT_EQ(four(s.segment), (Four{2, 2, 2, 0}));
  EXPECT_EQ(four(s.segment, kSmall), (Four{1, 1, 1, 0}));
  EXPECT_EQ(four(s.segment, kLarge), (Four{1, 1, 1, 0}));
  // The large block needs two pages, and takes a whole handle: the next one can go on there.
  EXPECT_EQ(four(s.reserved_bytes, kSmall), (Four{n(2_MiB), n(2_MiB), n(2_MiB), 0}));
  const std::int64_t rest = s.reserved_bytes.part[kLarge].current;
  EXPECT_EQ(rest, n(8_MiB));
  EXPECT_EQ(s.inactive_split_bytes.part[kSmall].current, n(2_MiB) - 1024);
  EXPECT_EQ(s.inactive_split_bytes.part[kLarge].current, rest - 3146240);
  EXPECT_EQ(s.inactive_split.all().current, 2);

  free(large);
  s = stats();
  EXPECT_EQ(four(s.allocation), (Four{1, 2, 2, 1}));
  EXPECT_EQ(four(s.allocation, kLarge), (Four{0, 1, 1, 1}));
  EXPECT_EQ(four(s.allocated_bytes), (Four{1024, 3147264, 3147264, 3146240}));
  EXPECT_EQ(four(s.requested_bytes), (Four{1000, 3146729, 3146729, 3145729}));
  EXPECT_EQ(four(s.active_bytes, kLarge), (Four{0, 3146240, 3146240, 3146240}));
  EXPECT_EQ(s.inactive_split_bytes.part[kLarge].current, 0);  // all of it can be given back
  EXPECT_EQ(s.inactive_split.all().current, 1);
  EXPECT_EQ(s.reserved_bytes.all().current, n(2_MiB) + rest);

  free(small);
  allocator_->trim({});
  s = stats();
  EXPECT_EQ(four(s.allocation), (Four{0, 2, 2, 2}));
  EXPECT_EQ(four(s.segment), (Four{0, 2, 2, 2}));
  EXPECT_EQ(four(s.reserved_bytes), (Four{0, n(10_MiB), n(10_MiB), n(10_MiB)}));
  EXPECT_EQ(four(s.inactive_split_bytes).current, 0);
  EXPECT_EQ(s.num_device_alloc, calls(DriverCall::kCreate));
  EXPECT_EQ(s.num_device_free, calls(DriverCall::kRelease));
  EXPECT_EQ(s.num_ooms, 0u);
  EXPECT_EQ(s.num_alloc_retries, 0u);
  EXPECT_EQ(s.num_sync_all_streams, 0u);
}

TEST_F(AllocatorTest, BlocksOfOneMiBAreSmallToTorchAndThoseAboveAreLarge) {
  alloc(1_MiB);
  alloc(1_MiB + 1_B);
  EXPECT_EQ(stats().allocation.part[kSmall].current, 1);
  EXPECT_EQ(stats().allocation.part[kLarge].current, 1);
}

TEST_F(AllocatorTest, ResetPeaksAndResetAccumulatedLeaveWhatIsCurrent) {
  const DeviceAddr a = alloc(4_MiB);
  const DeviceAddr b = alloc(6_MiB);
  free(b);
  allocator_->reset_peaks();
  EXPECT_EQ(four(stats().allocated_bytes), (Four{n(4_MiB), n(4_MiB), n(10_MiB), n(6_MiB)}));
  allocator_->reset_accumulated();
  EXPECT_EQ(four(stats().allocated_bytes), (Four{n(4_MiB), n(4_MiB), 0, 0}));
  EXPECT_EQ(stats().num_device_alloc, 0u);
  free(a);
  EXPECT_EQ(four(stats().allocated_bytes), (Four{0, n(4_MiB), 0, n(4_MiB)}));
}

TEST_F(AllocatorTest, SmallBlocksUseTheLeftOversOfLargeOnes) {
  Options options;
  options.slack = 1;
  start(options);
  const DeviceAddr large = alloc(5_MiB);  // on a handle of 8 MiB: 3 MiB are over
  const Bytes before = reserved();
  EXPECT_EQ(before, 8_MiB);
  const DeviceAddr small = alloc(1_MiB);
  EXPECT_EQ(small, large + 5_MiB);
  EXPECT_EQ(reserved(), before);
}

TEST_F(AllocatorTest, HistoryHasEveryEventInOrderWithSizesTagsAndContexts) {
  allocator_->record_history(100, [] { return std::int64_t{42}; });
  const ContextRef context = make_context();
  const auto got =
      allocator_->allocate({5000_B, permanent(main_), kDefaultPool, 99, context.get()});
  allocator_->free(got.address);
  allocator_->trim({});
  const auto events = allocator_->history();
  ASSERT_EQ(events.size(), 5u);
  const DeviceAddr page{got.address.n / kPage.n * kPage.n};
  const struct {
    EventKind kind;
    DeviceAddr address;
    Bytes size;
    std::uint64_t tag;
  } expected[] = {{EventKind::kSegmentMap, page, 2_MiB, 0},
                  {EventKind::kAlloc, got.address, 5000_B, 99},
                  {EventKind::kFreeRequested, got.address, 5000_B, 99},
                  {EventKind::kFreeCompleted, got.address, 5000_B, 99},
                  {EventKind::kSegmentUnmap, page, 2_MiB, 0}};
  for (std::size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i].kind, expected[i].kind) << i;
    EXPECT_EQ(events[i].address, expected[i].address) << i;
    EXPECT_EQ(events[i].size, expected[i].size) << i;
    EXPECT_EQ(events[i].tag, expected[i].tag) << i;
    EXPECT_EQ(events[i].context, expected[i].tag == 0 ? nullptr : context) << i;
    EXPECT_EQ(events[i].time, 42) << i;
    EXPECT_EQ(events[i].stream, main_) << i;
    EXPECT_EQ(events[i].pool, kDefaultPool) << i;
  }
}

TEST_F(AllocatorTest, HistoryOfAFailureHasTheDevicesFreeBytes) {
  allocator_->record_history(100);
  alloc(1_GiB);
  const auto failed = allocator_->allocate({17_GiB, permanent(main_), kDefaultPool, 5, nullptr});
  ASSERT_FALSE(failed.ok());
  const HistoryEvent last = allocator_->history().back();
  EXPECT_EQ(last.kind, EventKind::kOutOfMemory);
  EXPECT_EQ(last.address.n, (15_GiB).n);
  EXPECT_EQ(last.size, 17_GiB);
  EXPECT_EQ(last.tag, 5u);
}

TEST_F(AllocatorTest, HistoryIsOffUntilItIsAskedFor) {
  alloc(1_MiB);
  EXPECT_TRUE(allocator_->history().empty());
  allocator_->record_history(2);
  for (int i = 0; i < 5; ++i) alloc(512_B);
  EXPECT_EQ(allocator_->history().size(), 2u);
  allocator_->record_history(0);
  alloc(512_B);
  EXPECT_TRUE(allocator_->history().empty());
}

TEST_F(AllocatorTest, TheContextOfABlockLivesAsLongAsTheBlock) {
  int ended = 0;
  ContextRef context = make_context(&ended);
  const auto got = allocator_->allocate({1_MiB, permanent(main_), kDefaultPool, 0, context.get()});
  context = nullptr;
  EXPECT_EQ(ended, 0);
  free(got.address);
  EXPECT_EQ(ended, 1);
}

TEST_F(AllocatorTest, FindsLiveBlocksByTheirAddressOnly) {
  const auto got = allocator_->allocate({5000_B, permanent(main_), kDefaultPool, 99, nullptr});
  const auto found = allocator_->find_block(got.address);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->address, got.address);
  EXPECT_EQ(found->size, 5120_B);
  EXPECT_EQ(found->requested, 5000_B);
  EXPECT_EQ(found->state, BlockState::kLive);
  EXPECT_EQ(found->stream, main_);
  EXPECT_EQ(found->pool, kDefaultPool);
  EXPECT_EQ(found->heap, HeapKind::kSmall);
  EXPECT_EQ(found->tag, 99u);
  EXPECT_EQ(allocator_->find_block(got.address + 512_B), std::nullopt);
  EXPECT_EQ(allocator_->find_block({12345}), std::nullopt);
  free(got.address);
  EXPECT_EQ(allocator_->find_block(got.address), std::nullopt);
}

TEST_F(AllocatorTest, ListsItsBlocksByAddressWithWhatIsReady) {
  const DeviceAddr a = alloc(1_MiB);
  const DeviceAddr b = alloc(512_KiB);
  const auto blocks = allocator_->blocks();
  ASSERT_EQ(blocks.size(), 3u);
  EXPECT_EQ(blocks[0].address, a);
  EXPECT_EQ(blocks[1].address, b);
  EXPECT_EQ(blocks[2].address, b + 512_KiB);
  EXPECT_EQ(blocks[2].size, 512_KiB);
  EXPECT_EQ(blocks[2].state, BlockState::kReady);
  EXPECT_EQ(blocks[2].requested, 0_B);
}

TEST_F(AllocatorTest, FreeIfLiveSaysWhetherThereWasSomethingToFree) {
  const DeviceAddr a = alloc(1_MiB);
  EXPECT_FALSE(allocator_->free_if_live(a + 512_B));
  EXPECT_FALSE(allocator_->free_if_live({12345}));
  EXPECT_TRUE(allocator_->free_if_live(a));
  EXPECT_FALSE(allocator_->free_if_live(a));
  EXPECT_EQ(four(stats().allocation), (Four{0, 1, 1, 1}));
}

TEST_F(AllocatorTest, OwnsItsAddressesAndItsPlainMemory) {
  const DeviceAddr a = alloc(1_MiB);
  EXPECT_TRUE(allocator_->owns(a + 100_B));
  EXPECT_FALSE(allocator_->owns({12345}));
  const PoolId pool = allocator_->create_pool({.plain = true});
  const DeviceAddr plain = alloc(3_MiB, permanent(main_), pool);
  EXPECT_TRUE(allocator_->owns(plain + 3_MiB));  // of its segment of 20 MiB
  EXPECT_FALSE(allocator_->owns(plain + 20_MiB));
}

TEST_F(AllocatorTest, TheCushionComesWhenThePeakHasStoodStill) {
  cushion_ = 0.25;
  Options options;
  options.cushion_until = 2_GiB;  // a small program; the device has room for eight of them
  start(options);
  alloc(512_MiB);
  free(alloc(64_MiB));
  alloc(16_MiB, new_stream());  // it is still growing: what is idle moves
  EXPECT_EQ(reserved(), 576_MiB);
  for (int i = 0; i < 2048; ++i) free(alloc(1_KiB));
  const std::int64_t before = stats().reserved_bytes.all().current;
  const std::uint64_t moved = paths().harvested_other;
  alloc(16_MiB, new_stream());
  EXPECT_EQ(stats().reserved_bytes.all().current, before + static_cast<std::int64_t>((16_MiB).n));
  EXPECT_EQ(paths().harvested_other, moved);

  (void)allocator_->trim({});  // a new phase grows anew, without one
  free(alloc(64_MiB));
  const std::int64_t anew = stats().reserved_bytes.all().current;
  alloc(16_MiB, new_stream());
  EXPECT_EQ(stats().reserved_bytes.all().current, anew);
}

TEST_F(AllocatorTest, TheFiguresOfTheDeviceAddUpWithoutAFailureToo) {
  gpu_.occupy(1_GiB);
  allocator_->set_cap(10_GiB);
  alloc(3_MiB);
  free(alloc(64_MiB));
  const MemoryFigures f = allocator_->memory_figures();
  EXPECT_TRUE(f.device_known);
  EXPECT_EQ(f.device_total, 16_GiB);
  EXPECT_EQ(f.others, 1_GiB);
  EXPECT_EQ(f.cap, 10_GiB);
  EXPECT_EQ(f.live, 3_MiB);
  EXPECT_EQ(f.held, f.reserved - 67_MiB);
  EXPECT_EQ(f.idle + f.idle_pending, 64_MiB);
  EXPECT_EQ(f.device_total, f.reserved + f.others + f.device_free);
  gpu_.fail_always(DriverCall::kMemory);
  EXPECT_FALSE(allocator_->memory_figures().device_known);
  gpu_.clear_failures();
}

TEST_F(AllocatorTest, EachIntervalHasItsOwnPeakWhateverIsReset) {
  const DeviceAddr a = alloc(4_MiB);
  free(alloc(6_MiB));
  allocator_->reset_peaks();
  EXPECT_EQ(allocator_->take_interval_peak(), 10_MiB);
  EXPECT_EQ(allocator_->take_interval_peak(), 4_MiB);  // nothing since
  free(a);
  alloc(2_MiB);
  EXPECT_EQ(allocator_->take_interval_peak(), 4_MiB);
  EXPECT_EQ(allocator_->take_interval_peak(), 2_MiB);
}

TEST_F(AllocatorTest, MoreThan2To60BytesIsRefusedBeforeAnyArithmetic) {
  for (const Bytes size : {kMaxRequest + 1_B, Bytes{~0ull}}) {
    gpu_.reset_meter();
    const AllocResult got = try_alloc(size);
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.failure->cause, OomCause::kNonsenseSize);
    EXPECT_EQ(got.failure->requested, size);
    EXPECT_EQ(mapping_calls(), 0u);
  }
  EXPECT_EQ(stats().num_ooms, 2u);
}

TEST_F(AllocatorTest, TheLargestAllowedRequestFailsCleanlyToo) {
  const AllocResult got = try_alloc(kMaxRequest);
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.failure->cause, OomCause::kNonsenseSize);
  alloc(1_MiB);
}

TEST_F(AllocatorTest, ADestructorGivesBackWhatIsLiveIdleAndMapped) {
  alloc(100_MiB);
  free(alloc(40_MiB));
  allocator_.reset();
  EXPECT_TRUE(gpu_.empty());
}

TEST_F(AllocatorTest, ADestructorWaitsForWorkOnBlocksThatWereFreed) {
  gpu_.set_lag_us(1000);
  const DeviceAddr a = alloc(1_MiB);  // too small for an event of its own
  gpu_.launch(main_, {writes({a, 1_MiB}, 1)});
  free(a);
  allocator_.reset();
  EXPECT_TRUE(gpu_.empty());
  EXPECT_EQ(joined_hazards(gpu_), "");
}

TEST_F(AllocatorTest, MakesNoDriverCallAfterShutDown) {
  const DeviceAddr a = alloc(1_MiB);
  const PoolId pool = allocator_->create_pool({});
  allocator_->begin_capture();
  allocator_->shut_down();
  gpu_.shut_down();
  allocator_->free(a);
  allocator_->end_capture();
  allocator_->release_pool(pool);
  const AllocResult got = try_alloc(1_MiB);
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(got.failure->cause, OomCause::kShuttingDown);
  EXPECT_FALSE(got.failure->device_known);
  EXPECT_EQ(allocator_->trim({}).released, 0_B);
  EXPECT_FALSE(allocator_->maintain());
  EXPECT_FALSE(allocator_->memory_figures().device_known);
  allocator_.reset();
  EXPECT_EQ(gpu_.calls_after_shutdown(), 0u);
}

using AllocatorDeathTest = AllocatorTest;

TEST_F(AllocatorDeathTest, AbortsOnADoubleFreeInEveryBuild) {
  const DeviceAddr a = alloc(1_MiB);
  free(a);
  EXPECT_DEATH(allocator_->free(a), "not a live block");
}

TEST_F(AllocatorDeathTest, AbortsOnAnAddressOfSomebodyElse) {
  const DeviceAddr a = alloc(1_MiB);
  EXPECT_DEATH(allocator_->free({0}), "not a live block");
  EXPECT_DEATH(allocator_->free(a + 512_B), "not a live block");
  EXPECT_DEATH(allocator_->free(a + 1_B), "not a live block");
  EXPECT_DEATH(allocator_->free({0xDEAD0000}), "not a live block");
}

TEST_F(AllocatorDeathTest, AbortsOnASecondFreeWhileTheBlockIsPending) {
  const StreamInfo other = new_stream();
  const DeviceAddr a = alloc(1_MiB);
  gpu_.set_manual(true);
  allocator_->record_stream(a, other);
  free(a);
  EXPECT_DEATH(allocator_->free(a), "not a live block");
  gpu_.set_manual(false);
}

TEST_F(AllocatorDeathTest, AbortsOnOptionsOutOfRange) {
  Options options;
  options.max_aliases = 0;
  EXPECT_DEATH(DeviceAllocator(gpu_, options), "out of range");
}

TEST_F(AllocatorDeathTest, AbortsOnAnEndOfACaptureThatDidNotBegin) {
  EXPECT_DEATH(allocator_->end_capture(), "without begin_capture");
}

}  // namespace
}  // namespace gpumemx
