// SPDX-License-Identifier: BSD-3-Clause
//
// The short way of a request and of a free: what is parked, who may have it, and what is counted.
// AllocatorTest's helpers validate the books after each step, which takes back all that is parked; the
// tests here mostly call the allocator themselves.
#include "core/front.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "support/contexts.hpp"
#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

class FrontTest : public AllocatorTest {
 protected:
  DeviceAddr get(Bytes size, const StreamInfo& stream) {
    const AllocResult got = try_alloc(size, stream);
    EXPECT_TRUE(got.ok());
    return got.address;
  }
  DeviceAddr get(Bytes size) { return get(size, permanent(main_)); }
  void put(DeviceAddr a) { allocator_->free(a); }
  // Else the streams would take the one handle from each other, again and again.
  void keep_memory_on(const StreamInfo& stream) { (void)get(512_B, stream); }
  Four live_bytes() const { return four(stats().allocated_bytes); }

  const StreamInfo other_ = new_stream();
};

TEST_F(FrontTest, AFreedBlockServesTheNextRequestOfItsSize) {
  const DeviceAddr a = get(1000_B);
  put(a);
  EXPECT_EQ(get(1024_B), a);  // the same size of block
  EXPECT_EQ(paths().front_hits, 1u);
  EXPECT_EQ(paths().hits, 1u);
  EXPECT_EQ(stats().requested_bytes.all().current, 1024);
  put(a);
  EXPECT_NE(get(1025_B), a);
}

TEST_F(FrontTest, LargeBlocksAreNotParked) {
  put(get(2_MiB));
  put(get(2_MiB));
  EXPECT_EQ(paths().hits, 1u);
  EXPECT_EQ(paths().front_hits, 0u);
}

TEST_F(FrontTest, AParkedBlockIsNobodysBlock) {
  const DeviceAddr a = get(4_KiB);
  const DeviceAddr keep = get(4_KiB);
  put(a);
  EXPECT_FALSE(allocator_->free_if_live(a));
  EXPECT_FALSE(allocator_->record_stream(a, other_));
  EXPECT_FALSE(allocator_->annotate(a));
  EXPECT_EQ(allocator_->find_block(a), std::nullopt);
  EXPECT_EQ(get(4_KiB), a);  // none of that took it out of its front
  EXPECT_EQ(allocator_->find_block(a)->size, 4_KiB);
  EXPECT_TRUE(allocator_->find_block(keep).has_value());
}

TEST_F(FrontTest, WrongPointersAreRefusedWithoutTheLockToo) {
  const DeviceAddr a = get(4_KiB);
  for (const DeviceAddr wrong : {a + 512_B, a + 1_B, a + 2_MiB, a + 3_GiB, DeviceAddr{},
                                 DeviceAddr{~0ull}, DeviceAddr{12345}}) {
    EXPECT_FALSE(allocator_->free_if_live(wrong)) << wrong.n;
  }
  put(a);
}

TEST_F(FrontTest, WhatIsParkedCountsAsFree) {
  const DeviceAddr keep = get(512_B);
  const DeviceAddr a = get(64_KiB);
  put(a);
  const Stats s = stats();
  EXPECT_EQ(four(s.allocation), (Four{1, 2, 2, 1}));
  EXPECT_EQ(four(s.active_bytes), (Four{512, 512 + (64 << 10), 512 + (64 << 10), 64 << 10}));
  EXPECT_EQ(s.inactive_split_bytes.all().current, n(2_MiB - 512_B));
  EXPECT_EQ(allocator_->blocks().size(), 2u);
  put(keep);
  EXPECT_EQ(allocator_->memory_figures().idle + allocator_->memory_figures().idle_pending, 2_MiB);
  EXPECT_EQ(allocator_->trim({}).released, 2_MiB);
}

TEST_F(FrontTest, OtherSizesFindParkedMemoryWhenTheyNeedIt) {
  std::vector<DeviceAddr> all;
  for (int i = 0; i < 32; ++i) all.push_back(get(64_KiB));  // one handle, full
  for (const DeviceAddr a : all) put(a);
  (void)get(1_MiB);
  EXPECT_EQ(paths().misses, 1u);
}

TEST_F(FrontTest, AnotherStreamsMissFindsParkedMemory) {
  start({.cap = 2_MiB});
  put(get(64_KiB));
  gpu_.complete_all();
  EXPECT_TRUE(try_alloc(1_MiB, other_).ok());
  EXPECT_EQ(reserved(), 2_MiB);
}

TEST_F(FrontTest, MuchIsNotParked) {
  std::vector<DeviceAddr> all;
  for (int i = 0; i < 20; ++i) all.push_back(get(512_KiB));
  const std::uint64_t misses = paths().misses;
  for (const DeviceAddr a : all) put(a);
  for (int i = 0; i < 20; ++i) (void)get(512_KiB);
  EXPECT_EQ(paths().misses, misses);
  EXPECT_LE(paths().front_hits, 8u);
}

TEST_F(FrontTest, RecordedStreamsMakeAParkableBlockPending) {
  gpu_.set_manual(true);
  const DeviceAddr a = get(4_KiB);
  put(a);
  ASSERT_EQ(get(4_KiB), a);
  allocator_->record_stream(a, other_);
  gpu_.launch(other_.ref, {writes({a, 4_KiB}, 1)});
  put(a);
  EXPECT_NE(get(4_KiB), a);
  EXPECT_EQ(stats().active.all().current, 2);
  gpu_.complete_all();
}

TEST_F(FrontTest, TheHistorySeesEveryEventFromItsBeginOn) {
  put(get(4_KiB));
  put(get(4_KiB));
  allocator_->record_history(100);
  put(get(4_KiB));
  std::vector<EventKind> kinds;
  for (const HistoryEvent& e : allocator_->history()) kinds.push_back(e.kind);
  EXPECT_EQ(kinds,
            (std::vector{EventKind::kAlloc, EventKind::kFreeRequested, EventKind::kFreeCompleted}));
  allocator_->record_history(0);
  put(get(4_KiB));
  put(get(4_KiB));
  EXPECT_EQ(paths().front_hits, 2u);  // one before, one after
}

TEST_F(FrontTest, AHistoryUsesWhatIsParkedAndMissesNothing) {
  allocator_->record_history(100);
  int ended = 0;
  DeviceAddr first{};
  for (std::uint64_t i = 0; i < 4; ++i) {
    const Cause allocating{make_context(&ended), nullptr};
    const Cause freeing{make_context(&ended), nullptr};
    DeviceAddr a{};
    {
      const CauseScope scope(allocating);
      a = allocator_
              ->allocate({4_KiB, permanent(main_), kDefaultPool, i + 1, allocating.context.get()})
              .address;
    }
    if (i == 0) first = a;
    EXPECT_EQ(a, first);
    EXPECT_EQ(allocator_->find_block(a)->context, allocating.context);
    const CauseScope scope(freeing);
    put(a);
    EXPECT_FALSE(allocator_->find_block(a).has_value());
    EXPECT_FALSE(allocator_->free_if_live(a));
    const auto events = allocator_->history();
    ASSERT_GE(events.size(), 3u);
    const HistoryEvent* last = &events[events.size() - 3];
    EXPECT_EQ(last[0].kind, EventKind::kAlloc);
    EXPECT_EQ(last[1].kind, EventKind::kFreeRequested);
    EXPECT_EQ(last[2].kind, EventKind::kFreeCompleted);
    for (int k = 0; k < 3; ++k) {
      EXPECT_EQ(last[k].address, a);
      EXPECT_EQ(last[k].size, 4_KiB);
      EXPECT_EQ(last[k].tag, i + 1);
      EXPECT_EQ(last[k].context, k == 0 ? allocating.context : freeing.context);
    }
  }
  EXPECT_EQ(paths().front_hits, 3u);
  EXPECT_EQ(stats().active.all().current, 0);
  EXPECT_EQ(allocator_->layout().active, 0_B);
  EXPECT_EQ(ended, 0);
  allocator_->record_history(0);
  EXPECT_EQ(ended, 7);  // all but the first, which brought the memory, were the ring's alone
}

TEST_F(FrontTest, AHistoryDoesNotParkWhatOtherStreamsUse) {
  gpu_.set_manual(true);
  allocator_->record_history(100);
  const DeviceAddr a = get(4_KiB);
  EXPECT_TRUE(allocator_->record_stream(a, other_));
  gpu_.launch(other_.ref, {writes({a, 4_KiB}, 1)});
  put(a);
  EXPECT_EQ(allocator_->history().back().kind, EventKind::kFreeRequested);
  EXPECT_NE(get(4_KiB), a);
  EXPECT_EQ(paths().front_hits, 0u);
  gpu_.complete_all();
}

TEST_F(FrontTest, ContextsGoTheLongWayAndStayWithTheirBlock) {
  int ended = 0;
  ContextRef context = make_context(&ended);
  put(get(4_KiB));
  const DeviceAddr a =
      allocator_->allocate({4_KiB, permanent(main_), kDefaultPool, 9, context.get()}).address;
  EXPECT_EQ(allocator_->find_block(a)->context, context);
  context = nullptr;
  put(a);
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(allocator_->find_block(get(4_KiB))->context, nullptr);
}

TEST_F(FrontTest, FreesInACaptureAndAfterShutdownAreNotParked) {
  const DeviceAddr a = get(4_KiB);
  allocator_->begin_capture();
  put(a);
  EXPECT_EQ(get(4_KiB), a);
  allocator_->end_capture();
  EXPECT_EQ(paths().front_hits, 0u);
  EXPECT_EQ(paths().capture_blocks, 1u);
}

TEST_F(FrontTest, ThePeakIsExactWhenOneThreadUsesStreamsByTurns) {
  keep_memory_on(permanent(main_));
  keep_memory_on(other_);
  for (int i = 0; i < 10; ++i) {
    for (const StreamInfo& stream : {permanent(main_), other_}) {
      const DeviceAddr a = get(4_KiB, stream), b = get(8_KiB, stream);
      put(a);
      put(b);
    }
  }
  EXPECT_GT(paths().front_hits, 30u);
  EXPECT_EQ(live_bytes().peak, n(13_KiB));
  EXPECT_EQ(four(stats().allocation).peak, 4);
  EXPECT_EQ(live_bytes().allocated, 20 * n(12_KiB) + n(1_KiB));

  allocator_->reset_peaks();
  const DeviceAddr a = get(4_KiB), b = get(4_KiB, other_);
  put(a);
  const DeviceAddr c = get(8_KiB);
  put(b);
  put(c);
  EXPECT_EQ(live_bytes().peak, n(13_KiB));
  EXPECT_EQ(four(stats().allocation).peak, 4);
}

TEST_F(FrontTest, ThePeakIsExactWhenThreadsTakeTurns) {
  keep_memory_on(permanent(main_));
  keep_memory_on(other_);
  for (int i = 0; i < 50; ++i) {
    const DeviceAddr a = get(4_KiB);
    std::thread([&] {
      const DeviceAddr b = get(4_KiB, other_);
      put(a);
      const DeviceAddr c = get(4_KiB, other_);
      put(b);
      put(c);
    }).join();
  }
  EXPECT_EQ(live_bytes().peak, n(9_KiB));
  EXPECT_GT(paths().front_hits, 100u);
}

TEST_F(FrontTest, ThePeakOfAScopeIsExactToo) {
  put(get(64_KiB));
  EXPECT_EQ(allocator_->take_interval_peak(), 64_KiB);
  put(get(4_KiB));
  put(get(4_KiB));
  EXPECT_EQ(allocator_->take_interval_peak(), 4_KiB);
  EXPECT_EQ(allocator_->take_interval_peak(), 0_B);
}

TEST(Fronts, MoreStreamsThanPlacesAreServedToo) {
  SimDriver gpu(device_of(128_GiB));  // addresses enough for a heap of each stream
  DeviceAllocator allocator(gpu, {});
  const auto ask = [&](Bytes size, const StreamInfo& stream) {
    return allocator.allocate({size, stream, kDefaultPool, 0, nullptr});
  };
  std::vector<StreamInfo> streams;
  std::vector<DeviceAddr> blocks;
  for (int i = 0; i < 600; ++i) {
    streams.push_back(permanent(gpu.new_stream()));
    ASSERT_TRUE(ask(512_B, streams.back()).ok());  // its handle stays with it
  }
  for (int round = 0; round < 3; ++round) {
    for (const StreamInfo& s : streams) blocks.push_back(ask(4_KiB, s).address);
    for (const DeviceAddr a : blocks) allocator.free(a);
    blocks.clear();
  }
  const std::int64_t kept = 600 * 512, round = 600 * n(4_KiB);
  const Stats s = allocator.stats();
  EXPECT_EQ(four(s.allocated_bytes), (Four{kept, kept + round, kept + 3 * round, 3 * round}));
  EXPECT_EQ(s.paths.misses, 600u);
  EXPECT_GE(s.paths.front_hits, 2 * 256u);
  EXPECT_EQ(allocator.validate(), std::nullopt);
}

TEST_F(FrontTest, AnAllocatorAtTheAddressOfAnEarlierOneStartsAnew) {
  for (int i = 0; i < 3; ++i) {
    start({});
    const DeviceAddr a = get(4_KiB);
    put(a);
    EXPECT_EQ(get(4_KiB), a);
    put(a);
  }
}

TEST_F(FrontTest, BinsHoldOneSizeEach) {
  Front front(StreamId{1}, 100);
  const MutexLock lock(front.mu);
  std::vector<Block> blocks(100);
  int parked = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    blocks[i].size = kGranule * (i + 1);
    if (front.park(&blocks[i])) ++parked;
  }
  EXPECT_GT(parked, 30);
  EXPECT_LE(parked, 64);
  int found = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const bool was_parked = blocks[i].parked;
    EXPECT_EQ(front.may_have(blocks[i].size), was_parked);
    Block* block = front.take(blocks[i].size);
    EXPECT_EQ(block, was_parked ? &blocks[i] : nullptr);
    if (block != nullptr) ++found;
  }
  EXPECT_EQ(found, parked);
  EXPECT_TRUE(front.is_empty());
  EXPECT_EQ(front.take_reused(), static_cast<std::uint32_t>(found));
}

TEST_F(FrontTest, TakesTheBlockThatWasFreedLastAndEmptiesAtOnce) {
  Front front(StreamId{1}, 3);
  const MutexLock lock(front.mu);
  std::vector<Block> blocks(4);
  for (Block& b : blocks) b.size = 512_B;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(front.park(&blocks[static_cast<std::size_t>(i)]));
  EXPECT_TRUE(front.is_full(512_B));
  EXPECT_FALSE(front.park(&blocks[3]));
  EXPECT_EQ(front.take(512_B), &blocks[2]);
  int visited = 0;
  front.take_all([&](Block*) { ++visited; });
  EXPECT_EQ(visited, 2);
  EXPECT_FALSE(front.may_have(512_B));
}

TEST(Tally, AddsUpPeaksThatMayHaveBeenAtDifferentTimes) {
  Tally one, two;
  one.add(512_B, 500_B);
  one.sub(512_B, 500_B);
  two.add(2_MiB, 2_MiB);
  one += two;
  Stats s;
  one.add_to(s);
  EXPECT_EQ(four(s.allocated_bytes), (Four{n(2_MiB), n(2_MiB) + 512, n(2_MiB) + 512, 512}));
  EXPECT_EQ(four(s.requested_bytes, StatArray::kSmall), (Four{0, 500, 500, 500}));
  EXPECT_EQ(four(s.active, StatArray::kLarge), (Four{1, 1, 1, 0}));
}

}  // namespace
}  // namespace gpumemx
