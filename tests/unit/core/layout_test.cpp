// SPDX-License-Identifier: BSD-3-Clause
//
// What is where, at one moment, and the history that led there: the two must tell the same story.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "support/contexts.hpp"
#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

// Which stream and pool have memory at a page, by address: adjacent segments of one owner are one.
struct Owner {
  StreamId stream{};
  PoolId pool{};
  friend bool operator==(const Owner&, const Owner&) = default;
};
using Pages = std::map<std::uint64_t, Owner>;

// Applies the segment events to `pages`, or says which one can't be.
::testing::AssertionResult follow(const std::vector<HistoryEvent>& events, Pages& pages) {
  for (std::size_t i = 0; i < events.size(); ++i) {
    const HistoryEvent& e = events[i];
    const bool comes = e.kind == EventKind::kSegmentMap || e.kind == EventKind::kSegmentAlloc;
    const bool goes = e.kind == EventKind::kSegmentUnmap || e.kind == EventKind::kSegmentFree;
    if (!comes && !goes) continue;
    if (e.size.n == 0 || e.size.n % kPage.n != 0) {
      return ::testing::AssertionFailure() << "event " << i << " is not of whole pages";
    }
    for (DeviceAddr a = e.address; a < e.address + e.size; a = a + kPage) {
      const bool there = pages.contains(a.n);
      if (comes == there) {
        return ::testing::AssertionFailure()
               << "event " << i << (comes ? " maps" : " unmaps") << " a page that is "
               << (there ? "" : "not ") << "mapped";
      }
      if (comes) {
        pages[a.n] = {e.stream.id, e.pool};
      } else if (pages[a.n] == Owner{e.stream.id, e.pool}) {
        pages.erase(a.n);
      } else {
        return ::testing::AssertionFailure() << "event " << i << " is about another's page";
      }
    }
  }
  return ::testing::AssertionSuccess();
}

Pages pages_of(const MemoryLayout& layout) {
  Pages pages;
  for (const SegmentInfo& s : layout.segments) {
    for (DeviceAddr a = s.range.begin; a < s.range.end(); a = a + kPage) {
      pages[a.n] = {s.stream.id, s.pool};
    }
  }
  return pages;
}

class LayoutTest : public AllocatorTest {
 protected:
  explicit LayoutTest(Bytes capacity = 4_GiB) : AllocatorTest(device_of(capacity)) {}

  // The segments are in order and apart, their blocks tile them, and all sums are the statistics'.
  void check(const MemoryLayout& layout) {
    Bytes total, active, allocated, requested;
    DeviceAddr end{};
    std::size_t blocks = 0;
    for (const SegmentInfo& s : layout.segments) {
      EXPECT_GE(s.range.begin, end);
      end = s.range.end();
      DeviceAddr at = s.range.begin;
      EXPECT_GT(s.count, 0u);
      for (std::size_t i = s.first; i < s.first + s.count; ++i) {
        const BlockInfo& b = layout.blocks[i];
        EXPECT_EQ(b.address, at);
        EXPECT_EQ(b.stream, s.stream);
        EXPECT_EQ(b.pool, s.pool);
        at = at + b.size;
        if (b.state == BlockState::kLive) allocated += b.size;
        if (b.state != BlockState::kReady) {
          active += b.size;
          requested += b.requested;
        }
      }
      EXPECT_EQ(at, s.range.end());
      total += s.range.size;
      blocks += s.count;
    }
    EXPECT_EQ(blocks, layout.blocks.size());
    const Stats now = stats();
    EXPECT_EQ(n(allocated), now.allocated_bytes.all().current);
    EXPECT_EQ(n(active), now.active_bytes.all().current);
    EXPECT_EQ(layout.active, active);
    EXPECT_EQ(n(requested), now.requested_bytes.all().current);
    EXPECT_EQ(static_cast<std::int64_t>(layout.segments.size()), now.segment.all().current);
    EXPECT_LE(n(total), now.reserved_bytes.all().current);  // loose handles stand nowhere
  }
};

TEST_F(LayoutTest, IsEmptyAtFirst) {
  const MemoryLayout layout = allocator_->layout();
  EXPECT_TRUE(layout.segments.empty());
  EXPECT_TRUE(layout.blocks.empty());
  EXPECT_EQ(layout.events, 0u);
}

TEST_F(LayoutTest, HasEachRunOfMemoryWithItsBlocks) {
  const DeviceAddr a = alloc(3_MiB), b = alloc(512_B);
  free(alloc(40_MiB));
  const MemoryLayout layout = allocator_->layout();
  check(layout);
  ASSERT_EQ(layout.segments.size(), 2u);  // the small block stands in what the first left over
  std::map<std::uint64_t, BlockState> states;
  for (const BlockInfo& block : layout.blocks) states[block.address.n] = block.state;
  EXPECT_EQ(states[a.n], BlockState::kLive);
  EXPECT_EQ(states[b.n], BlockState::kLive);
}

TEST_F(LayoutTest, OfAPoolHasOnlyThatPool) {
  const PoolId pool = allocator_->create_pool({}), other = allocator_->create_pool({.plain = true});
  alloc(3_MiB);
  const DeviceAddr b = alloc(5_MiB, permanent(main_), pool);
  const DeviceAddr c = alloc(5_MiB, permanent(main_), other);
  const MemoryLayout one = allocator_->layout(pool), two = allocator_->layout(other);
  ASSERT_EQ(one.segments.size(), 1u);
  EXPECT_EQ(one.segments[0].pool, pool);
  EXPECT_TRUE(one.segments[0].range.contains(b));
  ASSERT_EQ(two.segments.size(), 1u);
  EXPECT_TRUE(is_plain(two.segments[0].heap));
  EXPECT_EQ(two.segments[0].range.begin, c);
  EXPECT_EQ(allocator_->layout().segments.size(), 3u);
  EXPECT_TRUE(allocator_->layout(PoolId{77}).segments.empty());
}

TEST_F(LayoutTest, PlainSegmentsAreNumberedInTheOrderOfTheirMaking) {
  Options plain;
  plain.plain = true;
  start(plain);
  std::map<std::uint64_t, std::uint64_t> serial;  // by address
  std::vector<DeviceAddr> order;
  for (int i = 0; i < 4; ++i) order.push_back(alloc(30_MiB));
  for (const SegmentInfo& s : allocator_->layout().segments) serial[s.range.begin.n] = s.serial;
  for (std::size_t i = 1; i < order.size(); ++i) {
    EXPECT_GT(serial[order[i].n], serial[order[i - 1].n]);
  }
}

TEST_F(LayoutTest, LookingIsAnEventThatTakesNothingFromWhatIsStillToBeRead) {
  allocator_->record_history(2);
  alloc(3_MiB);
  const MemoryLayout layout = allocator_->layout();
  EXPECT_EQ(layout.events, 2u);
  EXPECT_EQ(allocator_->history(layout.events).size(), 2u);  // map, alloc
  allocator_->note_snapshot(layout.active);
  const auto all = allocator_->history();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1].kind, EventKind::kSnapshot);
  EXPECT_EQ(all[1].size, 3_MiB);
}

TEST_F(LayoutTest, ShowsWhatAMissIsFillingOnlyWhereMemoryIs) {
  allocator_->record_history(1000);
  free(alloc(6_MiB));  // 8 MiB are ready, and can be grown into
  int looked = 0;
  gpu_.set_call_hook([&](DriverCall call) {
    if (call != DriverCall::kMap && call != DriverCall::kCreate) return;
    ++looked;
    Pages followed;
    const MemoryLayout layout = allocator_->layout();
    EXPECT_TRUE(follow(allocator_->history(layout.events), followed));
    EXPECT_EQ(followed, pages_of(layout));
    EXPECT_EQ(layout.active, Bytes{});
  });
  alloc(20_MiB);
  gpu_.set_call_hook(nullptr);
  EXPECT_GT(looked, 0);
}

TEST_F(LayoutTest, RemembersWhatBroughtTheMemory) {
  allocator_->record_history(100);
  const Cause growing{make_context(), nullptr};
  const Cause using_it{make_context(), nullptr};
  {
    const CauseScope scope(growing);
    free(alloc(3_MiB));
  }
  DeviceAddr block{};
  {
    const CauseScope scope(using_it);
    block = allocator_->allocate({3_MiB, permanent(main_), kDefaultPool, 0, using_it.context.get()})
                .address;
  }
  const MemoryLayout layout = allocator_->layout();
  ASSERT_EQ(layout.segments.size(), 1u);
  EXPECT_EQ(layout.segments[0].context, growing.context);
  EXPECT_EQ(layout.blocks[0].context, using_it.context);
  EXPECT_EQ(allocator_->find_block(block)->context, using_it.context);
  free(block);
  const auto events = allocator_->history();
  EXPECT_EQ(events.back().kind, EventKind::kFreeCompleted);
  EXPECT_EQ(events.back().context, using_it.context);  // nobody said why it was freed
  allocator_->trim({});
  EXPECT_EQ(allocator_->history().back().kind, EventKind::kSegmentUnmap);
  EXPECT_EQ(allocator_->history().back().context, growing.context);
}

TEST_F(LayoutTest, WhatIsRecordedCanStayWhenTheHistoryChanges) {
  allocator_->record_history(100);
  const DeviceAddr a = alloc(3_MiB);
  allocator_->record_history(3, nullptr, {}, /*keep=*/true);
  free(a);
  auto events = allocator_->history();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].kind, EventKind::kAlloc);
  HistoryRules rules;
  rules.skipped = 1u << static_cast<int>(EventKind::kFreeRequested);
  allocator_->record_history(100, nullptr, rules);
  free(alloc(3_MiB));
  EXPECT_EQ(allocator_->history().size(), 2u);
  allocator_->record_history(0, nullptr, {}, /*keep=*/true);
  EXPECT_TRUE(allocator_->history().empty());
  allocator_->record_history(5, nullptr, {}, /*keep=*/true);
  EXPECT_TRUE(allocator_->history().empty());
}

TEST_F(LayoutTest, ALongHistoryIsCopiedWhole) {
  allocator_->record_history(100000);
  for (int i = 0; i < 10000; ++i) allocator_->free(alloc(512_B));
  const auto events = allocator_->history();
  ASSERT_EQ(events.size(), 30001u);
  EXPECT_EQ(events[1].kind, EventKind::kAlloc);
  EXPECT_EQ(events[30000].kind, EventKind::kFreeCompleted);
  EXPECT_EQ(allocator_->history(5).size(), 5u);
}

TEST_F(LayoutTest, ThereIsNothingToSayAboutBlocksThatAreNotLive) {
  const DeviceAddr a = alloc(3_MiB);
  EXPECT_TRUE(allocator_->annotate(a));  // nobody listens
  allocator_->record_history(10);
  const Cause said{nullptr, std::make_shared<const int>(1)};
  {
    const CauseScope scope(said);
    EXPECT_TRUE(allocator_->annotate(a));
    EXPECT_FALSE(allocator_->annotate(a + 512_B));
  }
  const auto events = allocator_->history();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, EventKind::kAnnotate);
  EXPECT_EQ(events[0].address, a);
  EXPECT_EQ(events[0].size, 3_MiB);
  EXPECT_EQ(events[0].remark, said.remark);
  free(a);
  EXPECT_FALSE(allocator_->annotate(a));
}

TEST_F(LayoutTest, AListenerSeesPlainSegmentsWhileTheyExist) {
  struct Ear : HistoryListener {
    void on_event(const HistoryEvent& e) override {
      if (e.kind == EventKind::kSegmentAlloc) came.push_back(e);
      if (e.kind == EventKind::kSegmentFree) went.push_back(e);
      if (e.kind == EventKind::kSegmentAlloc || e.kind == EventKind::kSegmentFree) {
        at.push_back(gpu->meter().count(e.kind == EventKind::kSegmentAlloc ? DriverCall::kAllocate
                                                                           : DriverCall::kFree));
      }
    }
    SimDriver* gpu = nullptr;
    std::vector<HistoryEvent> came, went;
    std::vector<std::uint64_t> at;
  } ear;
  ear.gpu = &gpu_;
  Options plain;
  plain.plain = true;
  start(plain);
  allocator_->listen(&ear);
  const DeviceAddr a = alloc(30_MiB);
  free(a);
  allocator_->trim({});
  ASSERT_EQ(ear.came.size(), 1u);
  EXPECT_EQ(ear.came[0].address, a);
  EXPECT_EQ(ear.came[0].size, 30_MiB);
  ASSERT_EQ(ear.went.size(), 1u);
  EXPECT_EQ(ear.went[0].address, a);
  EXPECT_EQ(ear.went[0].size, 30_MiB);
  EXPECT_EQ(ear.at, (std::vector<std::uint64_t>{1, 0}));  // after the one call, before the other
  EXPECT_TRUE(allocator_->history().empty());
  allocator_->listen(nullptr);
  free(alloc(30_MiB));
  EXPECT_EQ(ear.came.size(), 1u);
}

// Random work of several streams and pools, with failing driver calls; now and then the history so
// far must lead to the layout there is.
class LayoutProgram : public LayoutTest, public ::testing::WithParamInterface<int> {
 protected:
  LayoutProgram() : LayoutTest(1_GiB) {}
};

TEST_P(LayoutProgram, TheHistoryLeadsToTheLayout) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto pick = [&](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  allocator_->record_history(1u << 20);
  gpu_.set_lag_us(GetParam() % 2 == 0 ? 0 : 500);
  std::vector<StreamInfo> streams{permanent(main_)};
  for (int i = 0; i < 3; ++i) streams.push_back(new_stream());
  std::vector<PoolId> pools{kDefaultPool, kDefaultPool, kDefaultPool};
  std::vector<DeviceAddr> live;
  Pages followed;
  std::uint64_t seen = 0;
  for (int i = 0; i < 1500; ++i) {
    const int what = pick(100);
    if (what < 52) {
      const Bytes size{pick(2) == 0 ? static_cast<std::uint64_t>(1 + pick(1 << 20))
                                    : static_cast<std::uint64_t>(1 + pick(60 << 20))};
      const auto got =
          try_alloc(size, streams[static_cast<std::size_t>(pick(4))],
                    pools[static_cast<std::size_t>(pick(static_cast<int>(pools.size())))]);
      if (got.ok()) live.push_back(got.address);
    } else if (what < 90 && !live.empty()) {
      std::swap(live[static_cast<std::size_t>(pick(static_cast<int>(live.size())))], live.back());
      if (pick(4) == 0) {
        allocator_->record_stream(live.back(), streams[static_cast<std::size_t>(pick(4))]);
      }
      allocator_->free(live.back());
      live.pop_back();
    } else if (what < 92) {
      allocator_->trim({});
    } else if (what < 94 && pools.size() < 6) {
      pools.push_back(allocator_->create_pool({.plain = pick(2) == 0}));
    } else if (what < 95 && pools.size() > 3) {
      allocator_->release_pool(pools.back());
      pools.pop_back();
    } else if (what < 96) {
      allocator_->maintain();
    }
    if (i % 50 != 0) continue;
    const MemoryLayout layout = allocator_->layout();
    check(layout);
    const auto events = allocator_->history(layout.events);
    ASSERT_TRUE(
        follow({events.begin() + static_cast<std::ptrdiff_t>(seen), events.end()}, followed));
    seen = events.size();
    ASSERT_EQ(followed, pages_of(layout)) << "after operation " << i;
  }
  for (const DeviceAddr a : live) allocator_->free(a);
}

INSTANTIATE_TEST_SUITE_P(Seeds, LayoutProgram, ::testing::Range(1, 9));

TEST_F(LayoutTest, WhatWouldExceedTheCapCanBeRejectedWithoutATry) {
  struct Ear : Observer {
    bool on_pressure(const PressureInfo&) override { return ++asked > 100; }
    int asked = 0;
  } ear;
  allocator_->add_observer(&ear);
  allocator_->record_history(100);
  allocator_->set_cap(1_GiB);
  const DeviceAddr a = alloc(900_MiB);
  AllocRequest request{200_MiB, permanent(main_), kDefaultPool, 0, nullptr, true};
  const AllocResult rejected = allocator_->allocate(request);
  ASSERT_FALSE(rejected.ok());
  EXPECT_TRUE(rejected.failure->rejected);
  EXPECT_EQ(rejected.failure->reserved, reserved());
  EXPECT_EQ(stats().num_oom_rejections, 1u);
  EXPECT_EQ(stats().num_ooms, 0u);
  EXPECT_EQ(ear.asked, 0);
  EXPECT_NE(allocator_->history().back().kind, EventKind::kOutOfMemory);
  request.reject_above_cap = false;
  const AllocResult failed = allocator_->allocate(request);
  ASSERT_FALSE(failed.ok());
  EXPECT_FALSE(failed.failure->rejected);
  EXPECT_EQ(stats().num_ooms, 1u);
  EXPECT_EQ(ear.asked, 1);
  free(a);
  request.reject_above_cap = true;  // what is cached serves it
  const AllocResult served = allocator_->allocate(request);
  ASSERT_TRUE(served.ok());
  free(served.address);
  allocator_->remove_observer(&ear);
}

}  // namespace
}  // namespace gpumemx
