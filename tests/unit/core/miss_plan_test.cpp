// SPDX-License-Identifier: BSD-3-Clause
#include "core/miss_plan.hpp"

#include <gtest/gtest.h>

#include "unit/core/heap_tools.hpp"

namespace gpumemx {
namespace {

class MissPlanTest : public HeapFixture {
 protected:
  // The plan for a block at the open end.
  std::optional<MissPlan> plan(Heap& h, Bytes size, bool may_exceed_budget = false) {
    EXPECT_TRUE(h.open_end(size));
    Region* region = h.regions().back();
    const DeviceAddr at = std::max(region->mapped_end, region->last->begin);
    return plan_at(h, at, region->range.end(), size, may_exceed_budget);
  }
  std::optional<MissPlan> plan_at(Heap& h, DeviceAddr at, DeviceAddr run_end, Bytes size,
                                  bool may_exceed_budget = false) {
    MissPlanner planner(sets_, books_.handles);
    const Candidate candidate{0, 0, {}, at, run_end, books_.arena.region_of(at)};
    return planner.plan(h, candidate, size, policy_, may_exceed_budget);
  }
  // An idle handle that stands in a heap of the set.
  Handle* idle_in(HeapSet& set, std::uint32_t pages, Stamp last_use = {}) {
    Heap& h = set.heap(HeapKind::kBig, books_);
    Block* block = fill(h, kPage * pages, {pages});
    const DeviceAddr at = block->begin;
    h.give(block, last_use);
    return handle_at(at);
  }
  static std::vector<std::uint32_t> pages(const MissPlan& p) {
    std::vector<std::uint32_t> out;
    for (const Piece& piece : p.pieces) out.push_back(piece.pages);
    return out;
  }

  std::vector<HeapSet*> sets_{&set_, &other_set_};
  Options options_{.cushion = 0};
  // No budget left, but room on the device.
  Policy policy_{options_, 1_GiB, 1_GiB, 100_GiB};
};

TEST_F(MissPlanTest, WithinTheBudgetMemoryIsCreatedEvenIfSomeIsIdle) {
  idle_in(set_, 32);
  policy_.peak_live = 2_GiB;
  const auto p = plan(heap(HeapKind::kPages), 64_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(pages(*p), (std::vector<std::uint32_t>{8, 8, 8, 8}));
  for (const Piece& piece : p->pieces) EXPECT_EQ(piece.handle, nullptr);
  EXPECT_EQ(p->fill_begin, p->at);
  EXPECT_EQ(p->fill_end, p->at + 64_MiB);
}

TEST_F(MissPlanTest, TheBudgetIsUsedUpToItsEndAndThenIdleMemory) {
  Handle* idle = idle_in(set_, 8);
  policy_.peak_live = 1_GiB + 16_MiB;
  const auto p = plan(heap(HeapKind::kPages), 32_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(pages(*p), (std::vector<std::uint32_t>{4, 4, 8}));
  EXPECT_EQ(p->pieces[2].handle, idle);
}

TEST_F(MissPlanTest, BeyondItTheOwnIdleMemoryComesFirstThenLooseThenThatOfOthers) {
  Handle* own = idle_in(set_, 4, {&line_, 1});  // ordered on the stream, that is enough
  Handle* others = idle_in(other_set_, 4);
  Handle* loose = loose_handle(4);
  const auto p = plan(heap(HeapKind::kPages), 24_MiB);
  ASSERT_TRUE(p.has_value());
  ASSERT_EQ(pages(*p), (std::vector<std::uint32_t>{4, 4, 4}));
  EXPECT_EQ(p->pieces[0].handle, own);
  EXPECT_EQ(p->pieces[1].handle, loose);
  EXPECT_EQ(p->pieces[2].handle, others);
}

TEST_F(MissPlanTest, OfOthersTheMemoryIdleLongestIsTaken) {
  HeapSet third;
  third.timeline = &other_line_;
  sets_.push_back(&third);
  Handle* old = idle_in(third, 4);
  Handle* young = idle_in(other_set_, 4);
  const auto p = plan(heap(HeapKind::kPages), 8_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(p->pieces[0].handle, old);
  EXPECT_NE(p->pieces[0].handle, young);
}

TEST_F(MissPlanTest, MemoryOfOthersIsTakenOnlyWhenItsWorkIsComplete) {
  idle_in(other_set_, 4, {&other_line_, 1});
  EXPECT_FALSE(plan(heap(HeapKind::kPages), 8_MiB).has_value());
  other_line_.reached(1);
  EXPECT_TRUE(plan(heap(HeapKind::kPages), 8_MiB).has_value());
}

TEST_F(MissPlanTest, APrivateSetTakesNeitherOrderedNorItsOwnIdleMemory) {
  set_.is_private = true;
  idle_in(set_, 4);
  loose_handle(4, {&line_, 1});
  EXPECT_FALSE(plan(heap(HeapKind::kPages), 8_MiB).has_value());
  Handle* complete = loose_handle(4);
  const auto p = plan(heap(HeapKind::kPages), 8_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(p->pieces[0].handle, complete);
}

TEST_F(MissPlanTest, OfHandlesThatFitTheLargestIsTaken) {
  Handle* small = idle_in(set_, 1);
  Handle* large = idle_in(set_, 4);
  idle_in(set_, 32);
  const auto p = plan(heap(HeapKind::kPages), 10_MiB);
  ASSERT_TRUE(p.has_value());
  ASSERT_EQ(pages(*p), (std::vector<std::uint32_t>{4, 1}));
  EXPECT_EQ(p->pieces[0].handle, large);
  EXPECT_EQ(p->pieces[1].handle, small);
}

TEST_F(MissPlanTest, AHandleMayStandOutOverTheGapByTheOverhangAndNoMore) {
  options_.recut = false;
  Handle* eight = idle_in(set_, 8);
  // 4 pages are missing: 8 stand out by 8 MiB, just what is allowed.
  const auto p = plan(heap(HeapKind::kPages), 8_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(p->pieces[0].handle, eight);
  EXPECT_EQ(p->fill_end, p->at + 16_MiB);
  EXPECT_FALSE(plan(heap(HeapKind::kPages), 6_MiB).has_value());
  options_.overhang = 10_MiB;
  EXPECT_TRUE(plan(heap(HeapKind::kPages), 6_MiB).has_value());
}

TEST_F(MissPlanTest, NothingStandsOutIntoWhatIsInUse) {
  options_.recut = false;
  Heap& h = heap(HeapKind::kPages);
  const DeviceAddr hole = ready(h, {4})->begin;
  fill(h, 2_MiB, {1});
  Handle* gone = handle_at(hole);
  set_.idle.remove(gone);
  Heap::leave_home(gone);
  Heap::forget(gone->aliases, books_);
  idle_in(set_, 8);
  EXPECT_FALSE(plan_at(h, hole, hole + 8_MiB, 8_MiB).has_value());
}

TEST_F(MissPlanTest, TheHeapOfOtherBlocksTakesNoHandleLargerThanItWouldCreate) {
  options_.recut = false;
  idle_in(set_, 8);
  EXPECT_FALSE(plan(heap(HeapKind::kRest), 5_MiB).has_value());  // it would create 4 pages
  Handle* four = idle_in(set_, 4);
  const auto p = plan(heap(HeapKind::kRest), 5_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(p->pieces[0].handle, four);
}

TEST_F(MissPlanTest, ARecutReleasesTheSmallestIdleHandleForAPieceOfTheRightSize) {
  Handle* large = loose_handle(32);
  Handle* middle = loose_handle(16);
  const auto p = plan(heap(HeapKind::kSmall), 1_MiB);
  ASSERT_TRUE(p.has_value());
  ASSERT_EQ(p->pieces.size(), 1u);
  EXPECT_EQ(p->pieces[0].victim, middle);
  EXPECT_NE(p->pieces[0].victim, large);
  EXPECT_EQ(p->pieces[0].handle, nullptr);
  EXPECT_EQ(p->pieces[0].pages, 1u);
}

TEST_F(MissPlanTest, ARecutLeavesAloneWhatIsNotCompleteAtEveryAddress) {
  Handle* handle = loose_handle(16, {&other_line_, 1});
  EXPECT_FALSE(plan(heap(HeapKind::kSmall), 1_MiB).has_value());
  other_line_.reached(1);
  EXPECT_TRUE(plan(heap(HeapKind::kSmall), 1_MiB).has_value());
  Heap& h = heap(HeapKind::kBig);
  ASSERT_TRUE(h.open_end(1_MiB));
  books_.handles.add_mapping(handle, h.regions()[0], h.regions()[0]->range.begin)->last_use = {
      &other_line_, 2};
  EXPECT_FALSE(plan(heap(HeapKind::kSmall), 1_MiB).has_value());
}

TEST_F(MissPlanTest, BeyondTheBudgetMemoryIsCreatedOnlyWhenAllowed) {
  EXPECT_FALSE(plan(heap(HeapKind::kPages), 8_MiB).has_value());
  const auto p = plan(heap(HeapKind::kPages), 8_MiB, true);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(pages(*p), (std::vector<std::uint32_t>{4}));
}

TEST_F(MissPlanTest, BeyondTheBudgetAWholeHandleIsCreatedWhereTheNextBlockCanGoOn) {
  Heap& h = heap(HeapKind::kRest);  // its handles are of 4 pages
  const auto p = plan(h, 3_MiB, /*may_exceed_budget=*/true);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(pages(*p), (std::vector<std::uint32_t>{4}));
  EXPECT_EQ(p->fill_end, p->fill_begin + 8_MiB);
  // Something stands behind the hole: no further than that.
  const DeviceAddr at = p->at;
  EXPECT_EQ(pages(*plan_at(h, at, at + 6_MiB, 3_MiB, true)), (std::vector<std::uint32_t>{3}));
  EXPECT_EQ(pages(*plan_at(h, at, at + 4_MiB, 3_MiB, true)), (std::vector<std::uint32_t>{2}));
}

TEST_F(MissPlanTest, BeyondTheBudgetNoHandleGoesFarBeyondTheBlock) {
  // A handle of 8 pages would stand out by more than the 3 that are allowed.
  EXPECT_EQ(pages(*plan(heap(HeapKind::kBig), 66_MiB, true)),
            (std::vector<std::uint32_t>{8, 8, 8, 8, 1}));
  EXPECT_EQ(pages(*plan(heap(HeapKind::kBig), 74_MiB, true)),
            (std::vector<std::uint32_t>{8, 8, 8, 8, 8}));
}

TEST_F(MissPlanTest, NearTheCapacityNothingIsCreatedBeyondTheBlock) {
  policy_.reserved = 80_GiB;
  EXPECT_EQ(pages(*plan(heap(HeapKind::kRest), 1_MiB, true)), (std::vector<std::uint32_t>{1}));
}

TEST_F(MissPlanTest, PageBlocksInAStreakShareAHandle) {
  policy_.streak = 512_MiB;
  EXPECT_EQ(pages(*plan(heap(HeapKind::kPages), 8_MiB, true)), (std::vector<std::uint32_t>{16}));
  policy_.peak_live = 1_GiB + 8_MiB;  // the block itself, but not the handle, is within the budget
  EXPECT_EQ(pages(*plan(heap(HeapKind::kPages), 8_MiB, true)), (std::vector<std::uint32_t>{16}));
}

TEST_F(MissPlanTest, TheCapacityIsNeverPassed) {
  policy_.capacity = 1_GiB + 7_MiB;
  EXPECT_FALSE(plan(heap(HeapKind::kPages), 8_MiB, true).has_value());
  const auto p = plan(heap(HeapKind::kPages), 6_MiB, true);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(pages(*p), (std::vector<std::uint32_t>{2, 1}));  // near the capacity handles are small
}

TEST_F(MissPlanTest, BeyondTheBudgetAHandleThatIsFarTooLargeComesBeforeGrowth) {
  options_.recut = false;
  Handle* idle = idle_in(set_, 32);
  Heap& h = heap(HeapKind::kRest);
  EXPECT_FALSE(plan(h, 3_MiB).has_value());  // within it, it is not worth being pinned by this
  const auto p = plan(h, 3_MiB, /*may_exceed_budget=*/true);
  ASSERT_TRUE(p.has_value());
  ASSERT_EQ(p->pieces.size(), 1u);
  EXPECT_EQ(p->pieces[0].handle, idle);
}

TEST_F(MissPlanTest, AHandleServesOnePieceOnly) {
  idle_in(set_, 4);
  EXPECT_FALSE(plan(heap(HeapKind::kPages), 16_MiB).has_value());
}

TEST_F(MissPlanTest, WhatIsReadyUnderTheBlockIsNotTakenForItsOtherGaps) {
  options_.recut = false;
  Heap& h = heap(HeapKind::kPages);
  const DeviceAddr begin = ready(h, {4})->begin;
  EXPECT_FALSE(plan_at(h, begin, h.regions()[0]->range.end(), 16_MiB).has_value());
  Handle* other = idle_in(set_, 4);
  const auto p = plan_at(h, begin, h.regions()[0]->range.end(), 16_MiB);
  ASSERT_TRUE(p.has_value());
  ASSERT_EQ(p->pieces.size(), 1u);
  EXPECT_EQ(p->pieces[0].at, begin + 8_MiB);
  EXPECT_EQ(p->pieces[0].handle, other);
  EXPECT_EQ(p->fill_begin, begin);
}

TEST_F(MissPlanTest, AliasesAreSwitchedToOrDroppedOrRuleThePlaceOut) {
  options_.recut = false;
  Heap& h = heap(HeapKind::kPages);
  const DeviceAddr begin = ready(h, {4})->begin;
  const DeviceAddr end = h.regions()[0]->range.end();
  Handle* handle = handle_at(begin);
  set_.idle.remove(handle);
  Heap::leave_home(handle);
  set_.idle.push(handle);
  Mapping* alias = handle->aliases;

  auto p = plan_at(h, begin, end, 8_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(p->switches, (std::vector{alias}));
  EXPECT_TRUE(p->stale.empty());
  EXPECT_TRUE(p->pieces.empty());

  // The same place for memory that somebody else uses now: the old mapping goes, if its work is done.
  set_.idle.remove(handle);
  handle->pinned = true;
  Handle* other = idle_in(set_, 4);
  p = plan_at(h, begin, end, 8_MiB);
  ASSERT_TRUE(p.has_value());
  EXPECT_EQ(p->stale, (std::vector{alias}));
  EXPECT_TRUE(p->switches.empty());
  ASSERT_EQ(p->pieces.size(), 1u);
  EXPECT_EQ(p->pieces[0].handle, other);

  alias->last_use = {&line_, 1};
  EXPECT_FALSE(plan_at(h, begin, end, 8_MiB).has_value());
}

}  // namespace
}  // namespace gpumemx
