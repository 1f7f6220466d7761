// SPDX-License-Identifier: BSD-3-Clause
#include "core/placement.hpp"

#include <gtest/gtest.h>

#include "unit/core/heap_tools.hpp"

namespace gpumemx {
namespace {

class PlacementTest : public HeapFixture {
 protected:
  // Takes the handle behind `at` away; the address stays mapped to it.
  Handle* vacate(DeviceAddr at) {
    Handle* handle = handle_at(at);
    Heap& where = *handle->home->heap;
    handle->idle_list->remove(handle);
    Heap::leave_home(handle);
    where.set().idle.push(handle);
    return handle;
  }
  void vacate_and_unmap(DeviceAddr at) { Heap::forget(vacate(at)->aliases, books_); }
};

using HitTest = PlacementTest;

TEST_F(HitTest, NothingIsFoundInAHeapWithoutFreeMemory) {
  Heap& h = heap();
  EXPECT_EQ(find_hit(h, 1_MiB, 16), std::nullopt);
  fill(h, 2_MiB, {1});
  EXPECT_EQ(find_hit(h, 1_MiB, 16), std::nullopt);
}

TEST_F(HitTest, AnExactFitComesFirst) {
  Heap& h = heap();
  Block* large = ready(h, {4});
  Block* taken = h.take(large, large->begin, 2_MiB);
  Block* wall = h.take(taken->next, taken->end() + 1_MiB, 512_B);
  ASSERT_EQ(wall->prev->size, 1_MiB);
  const auto hit = find_hit(h, 1_MiB, 16);
  ASSERT_TRUE(hit.has_value());
  EXPECT_EQ(hit->block, wall->prev);
  EXPECT_EQ(hit->at, wall->prev->begin);
  EXPECT_EQ(hit->waste, -n(1_MiB));
}

TEST_F(HitTest, WasteIsTheIdleBytesMadeBusyBeyondTheBlock) {
  Heap& h = heap();
  ready(h, {4});
  EXPECT_EQ(find_hit(h, 3_MiB, 16)->waste, n(5_MiB));
  EXPECT_EQ(find_hit(h, 7_MiB, 16)->waste, n(1_MiB));
}

TEST_F(HitTest, AHandleThatIsInUseCostsNothingMore) {
  Heap& h = heap();
  Block* whole = ready(h, {4});
  h.take(whole, whole->begin, 1_MiB);
  EXPECT_EQ(find_hit(h, 3_MiB, 16)->waste, -n(3_MiB));
}

TEST_F(HitTest, AHandleThatIsInUseAtTheUpperEndCostsNothingMoreEither) {
  Heap& h = heap();
  Block* whole = ready(h, {4, 1});
  const DeviceAddr begin = whole->begin;
  h.take(whole, begin + 9_MiB, 1_MiB);
  const auto hit = find_hit(h, 8704_KiB, 16);  // 8.5 MiB of 9 MiB
  EXPECT_EQ(hit->at, begin);
  EXPECT_EQ(hit->waste, -n(512_KiB));
}

TEST_F(HitTest, TakesTheEndWhereLessIsMadeBusy) {
  Heap& h = heap();
  Block* whole = ready(h, {4, 1});
  const auto hit = find_hit(h, 1536_KiB, 16);
  EXPECT_EQ(hit->at, whole->end() - 1536_KiB);
  EXPECT_EQ(hit->waste, n(512_KiB));
}

TEST_F(HitTest, TriesThePagesNextToTheEnds) {
  Heap& h = heap();
  // Free from 1 MiB on: 1 MiB of a busy page, two idle pages, 1 MiB of a busy page.
  Block* whole = ready(h, {1, 2, 1});
  const DeviceAddr begin = whole->begin;
  Block* low = h.take(whole, begin, 1_MiB);
  h.take(low->next, begin + 7_MiB, 1_MiB);
  const auto hit = find_hit(h, 4_MiB, 16);
  EXPECT_EQ(hit->waste, 0);
  EXPECT_GE(hit->at, begin + 1_MiB);
  EXPECT_LE(hit->at + 4_MiB, begin + 7_MiB);
}

TEST_F(HitTest, OfEqualWasteTheSmallerBlockIsTaken) {
  Heap& h = heap();
  Block* large = ready(h, {4});
  Block* small = h.take(large, large->begin, 1_MiB);               // 7 MiB on a busy handle
  Block* wall = h.take(small->next, small->end() + 3_MiB, 512_B);  // 3 MiB and the rest
  const auto hit = find_hit(h, 2_MiB, 16);
  EXPECT_EQ(hit->block, wall->prev);
  EXPECT_EQ(hit->waste, -n(2_MiB));
}

TEST_F(HitTest, LooksAtNoMoreBlocksThanToldTo) {
  Heap& h = heap();
  ready(h, {4});  // 8 MiB free on an idle handle, then a wall, then 6 MiB on a busy one
  Block* wall = fill(h, 2_MiB, {4});
  ASSERT_EQ(wall->next->size, 6_MiB);
  // The smaller block is in front and would cost nothing; both are looked at, or only it.
  EXPECT_EQ(find_hit(h, 5_MiB, 1)->block, wall->next);
  EXPECT_EQ(find_hit(h, 5_MiB, 2)->block, wall->next);
}

TEST_F(HitTest, BlocksThatAreALittleTooSmallDoNotHideALargerOne) {
  Heap& h = heap();
  const Bytes size = 1_MiB + 8_KiB;
  Block* page = fill(h, 2_MiB - (size - 512_B), {1});
  ASSERT_EQ(page->next->size, size - 512_B);  // in the request's own bin, looked at first
  ready(h, {4});
  const auto hit = find_hit(h, size, 1);
  ASSERT_TRUE(hit);
  EXPECT_GE(hit->block->size, size);
}

TEST_F(HitTest, SmallerBlocksOfTheSameBinCountAsLookedAt) {
  Heap& h = heap();
  // Two blocks in the bin of 1 MiB + 8 KiB: one just too small, one that fits.
  const Bytes size = 1_MiB + 8_KiB;
  Block* page = fill(h, 2_MiB - (size - 512_B), {1});
  ASSERT_EQ(page->next->size, size - 512_B);
  Block* second = fill(h, 2_MiB - size - 512_B, {1});
  ASSERT_EQ(second->next->size, size + 512_B);
  ASSERT_EQ(bin_of(size - 512_B), bin_of(size + 512_B));
  EXPECT_EQ(find_hit(h, size, 2)->block, second->next);
}

using UsableTest = PlacementTest;

TEST_F(UsableTest, MemoryOrderedOnTheStreamOrCompleteIsUsable) {
  Handle* h = new_handle(1);
  EXPECT_FALSE(usable_by(*h, set_));  // on its way from one use to another
  books_.handles.loose().push(h);
  EXPECT_TRUE(usable_by(*h, set_));
  h->last_use = {&line_, 1};
  EXPECT_TRUE(usable_by(*h, set_));         // its own stream's order
  EXPECT_FALSE(usable_by(*h, other_set_));  // not complete
  line_.reached(1);
  EXPECT_TRUE(usable_by(*h, other_set_));
}

TEST_F(UsableTest, APrivatePoolTakesOnlyWhatIsComplete) {
  set_.is_private = true;
  Handle* h = new_handle(1);
  books_.handles.loose().push(h);
  h->last_use = {&line_, 1};
  EXPECT_FALSE(usable_by(*h, set_));
  line_.reached(1);
  EXPECT_TRUE(usable_by(*h, set_));
}

TEST_F(UsableTest, MemoryInUseOrPinnedIsNot) {
  Block* block = fill(heap(), 1_MiB, {1});
  EXPECT_FALSE(usable_by(*handle_at(block->begin), set_));
  Handle* pinned = new_handle(1);
  books_.handles.loose().push(pinned);
  EXPECT_TRUE(usable_by(*pinned, set_));
  pinned->pinned = true;
  EXPECT_FALSE(usable_by(*pinned, set_));
}

TEST_F(UsableTest, OnlyAnAliasOfUsableMemoryCanBeSwitchedTo) {
  Block* block = ready(heap(), {1});
  const DeviceAddr at = block->begin;
  Mapping* mapping = handle_at(at)->home;
  EXPECT_FALSE(can_switch(*mapping, set_));  // it is home there
  Handle* handle = vacate(at);
  EXPECT_TRUE(can_switch(*mapping, set_));
  handle->last_use = {&line_, 1};
  EXPECT_FALSE(can_switch(*mapping, other_set_));
}

class SearchTest : public PlacementTest {
 protected:
  std::span<const Candidate> find(Heap& h, Bytes size) {
    EXPECT_TRUE(h.open_end(size));
    return search_.find(h, size, policy_, books_.handles, CandidateSearch::kAllPlaces);
  }
  const Candidate* at(std::span<const Candidate> all, DeviceAddr where) {
    for (const Candidate& c : all) {
      if (c.at == where) return &c;
    }
    return nullptr;
  }
  Options options_;
  Policy policy_{options_, 1_GiB, 1_GiB, 100_GiB};
  CandidateSearch search_;
};

TEST_F(SearchTest, AnEmptyHeapHasItsOpenEnd) {
  Heap& h = heap(HeapKind::kPages);
  const auto& found = find(h, 64_MiB);
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0].at, h.regions()[0]->range.begin);
  EXPECT_EQ(found[0].run.n, ~0ull);
  EXPECT_EQ(found[0].pages_pinned, 32u);
  // 64 MiB take four handles of 16 MiB; no byte is wasted.
  EXPECT_DOUBLE_EQ(found[0].key, 4 * options_.price_pages * kMapCost);
}

TEST_F(SearchTest, AHoleWithoutMappingsCostsAsMuchAndComesFirst) {
  Heap& h = heap(HeapKind::kPages);
  Block* hole = ready(h, {32});
  const DeviceAddr at_hole = hole->begin;
  fill(h, 2_MiB, {1});
  vacate_and_unmap(at_hole);
  const auto& found = find(h, 64_MiB);
  EXPECT_EQ(found[0].at, at_hole);
  EXPECT_EQ(found[0].run, 64_MiB);
  EXPECT_EQ(found[0].run_end, at_hole + 64_MiB);
}

TEST_F(SearchTest, AnAliasThatCanBeSwitchedToIsCheapest) {
  Heap& h = heap(HeapKind::kPages);
  Block* hole = ready(h, {32});
  const DeviceAddr at_hole = hole->begin;
  fill(h, 2_MiB, {1});
  vacate(at_hole);
  const auto& found = find(h, 64_MiB);
  EXPECT_EQ(found[0].at, at_hole);
  EXPECT_DOUBLE_EQ(found[0].key, options_.price_pages * kSwitchCost);
}

TEST_F(SearchTest, AnAliasOfBusyMemoryHasToBeUnmappedFirst) {
  Heap& h = heap(HeapKind::kPages);
  Heap& other = other_set_.heap(HeapKind::kPages, books_);
  Block* hole = ready(h, {32});
  const DeviceAddr at_hole = hole->begin;
  fill(h, 2_MiB, {1});
  Handle* handle = vacate(at_hole);
  set_.idle.remove(handle);
  ASSERT_TRUE(other.open_end(64_MiB));
  const DeviceAddr there = other.regions()[0]->range.begin;
  Block* filling = other.begin_fill(there, there + 64_MiB);
  other.install(filling, handle, there);
  other.finish_fill(filling, there, 64_MiB);
  const Candidate* c = at(find(h, 64_MiB), at_hole);
  ASSERT_NE(c, nullptr);
  EXPECT_DOUBLE_EQ(c->key, options_.price_pages * (4 * kMapCost + policy_.repoint_cost()));
  // And while work at the old address may still run, the place cannot be had at all.
  handle->aliases->next_alias->last_use = {&line_, 1};
  ASSERT_FALSE(handle->aliases->next_alias->is_home());
  EXPECT_EQ(at(find(h, 64_MiB), at_hole), nullptr);
  EXPECT_FALSE(
      search_.find(h, 64_MiB, policy_, books_.handles, CandidateSearch::kAllPlaces).empty());
}

TEST_F(SearchTest, WhatIsReadyAtTheEdgeOfARunIsExtended) {
  Heap& h = heap(HeapKind::kPages);
  Block* low = ready(h, {4});
  const DeviceAddr begin = low->begin;
  const auto& found = find(h, 16_MiB);  // 8 MiB are there; 8 MiB more behind them
  EXPECT_EQ(found[0].at, begin);
  EXPECT_EQ(found[0].pages_pinned, 8u);
  EXPECT_DOUBLE_EQ(found[0].key, options_.price_pages * kMapCost);
}

TEST_F(SearchTest, ARunThatIsAllReadyNeedsNoMapping) {
  Heap& h = heap(HeapKind::kRest);
  Block* hole = ready(h, {16});
  fill(h, 2_MiB, {1});
  const auto& found = find(h, 3_MiB);
  const Candidate* c = at(found, hole->begin);
  ASSERT_NE(c, nullptr);
  EXPECT_DOUBLE_EQ(c->key, 29);  // all waste: 32 - 3 MiB
  EXPECT_EQ(c->run, 32_MiB);
}

TEST_F(SearchTest, TheOpenEndLiesBeyondDormantAliases) {
  Heap& h = heap(HeapKind::kPages);
  Block* block = ready(h, {4});
  const DeviceAddr begin = block->begin;
  Handle* handle = vacate(begin);
  set_.idle.remove(handle);
  handle->last_use = handle->aliases->last_use = {&other_line_, 1};  // neither switch nor unmap
  const auto& found = find(h, 8_MiB);
  EXPECT_EQ(at(found, begin), nullptr);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].at, begin + 8_MiB);
}

TEST_F(SearchTest, LooksAtTheSmallestRunsThatFit) {
  Heap& h = heap(HeapKind::kPages);
  std::vector<DeviceAddr> holes;
  for (const std::uint32_t pages : {8u, 2u, 4u}) {
    holes.push_back(ready(h, {pages})->begin);
    fill(h, 2_MiB, {1});
  }
  for (const DeviceAddr hole : holes) vacate_and_unmap(hole);
  options_.miss_runs = 1;
  const auto& found = find(h, 6_MiB);  // 4 MiB are too small, 8 MiB the smallest that fit
  EXPECT_NE(at(found, holes[2]), nullptr);
  EXPECT_EQ(at(found, holes[0]), nullptr);
  options_.miss_runs = 0;  // the open end is always looked at
  ASSERT_FALSE(find(h, 6_MiB).empty());
  for (const Candidate& c :
       search_.find(h, 6_MiB, policy_, books_.handles, CandidateSearch::kAllPlaces)) {
    EXPECT_EQ(c.run.n, ~0ull);
  }
}

TEST_F(SearchTest, EndsAtAPlaceThatNeedsNoDriverCallAndWastesLittle) {
  Heap& h = heap(HeapKind::kPages);
  const DeviceAddr small = ready(h, {4})->begin;
  fill(h, 2_MiB, {1});
  const DeviceAddr large = ready(h, {4, 4})->begin;
  fill(h, 2_MiB, {1});
  vacate(small);
  vacate(large);
  vacate(large + 8_MiB);
  ASSERT_TRUE(h.open_end(6_MiB));
  const auto found = search_.find(h, 6_MiB, policy_, books_.handles, /*most=*/100);
  EXPECT_NE(at(found, small), nullptr);
  EXPECT_EQ(at(found, large), nullptr);           // not looked at any more
  EXPECT_NE(at(find(h, 6_MiB), large), nullptr);  // unless all are asked for
  policy_.reserved = policy_.capacity;            // tight: every place is weighed
  EXPECT_NE(at(search_.find(h, 6_MiB, policy_, books_.handles, /*most=*/100), large), nullptr);
}

TEST_F(SearchTest, TheLongerItSearchesTheMoreAPlaceMayWaste) {
  // Places for 6 MiB in smaller runs of one handle each, all of which waste 2 MiB or more; good would be
  // 1 MiB after one run, and 2 MiB after six.
  policy_.reserved = 9_GiB;  // no cushion
  policy_.peak_live = 8_GiB;
  Heap& h = heap(HeapKind::kRest);
  std::vector<DeviceAddr> holes;
  for (int i = 0; i < 8; ++i) {
    holes.push_back(ready(h, {4})->begin);
    fill(h, 2_MiB, {1});
  }
  ASSERT_TRUE(h.open_end(6_MiB));
  const auto found = search_.find(h, 6_MiB, policy_, books_.handles, /*most=*/100);
  EXPECT_NE(at(found, holes[5]), nullptr);
  EXPECT_EQ(at(found, holes[6]), nullptr);
  EXPECT_DOUBLE_EQ(at(found, holes[0])->key, 2);
}

TEST_F(SearchTest, WhereAReadyPlaceIsKnownOthersMustBeAsCheap) {
  // A ready place wastes 10 MiB; one handle to map is worth 14.8 MiB, so no void run can win.
  policy_.reserved = 9_GiB;  // no cushion
  policy_.peak_live = 8_GiB;
  Heap& h = heap(HeapKind::kRest);
  const DeviceAddr empty = ready(h, {4})->begin;
  fill(h, 2_MiB, {1});
  ready(h, {8});
  fill(h, 2_MiB, {1});
  vacate_and_unmap(empty);
  ASSERT_TRUE(h.open_end(6_MiB));
  EXPECT_EQ(at(search_.find(h, 6_MiB, policy_, books_.handles, /*most=*/100), empty), nullptr);
  EXPECT_NE(at(find(h, 6_MiB), empty), nullptr);  // unless all are asked for
  options_.price = 10;                            // now it is worth 6.2 MiB
  EXPECT_NE(at(search_.find(h, 6_MiB, policy_, books_.handles, /*most=*/100), empty), nullptr);
}

TEST_F(SearchTest, TwoAliasesOfOneHandleServeOnlyOnce) {
  Heap& h = heap(HeapKind::kPages);
  Block* first = ready(h, {4});
  const DeviceAddr begin = first->begin;
  Handle* handle = vacate(begin);
  // A second address of the same memory right behind the first.
  set_.idle.remove(handle);
  Block* filling = h.begin_fill(begin + 8_MiB, begin + 16_MiB);
  h.install(filling, handle, begin + 8_MiB);
  h.give(h.finish_fill(filling, begin + 8_MiB, 8_MiB), {});
  vacate(begin + 8_MiB);
  const Candidate* c = at(find(h, 16_MiB), begin);
  ASSERT_NE(c, nullptr);
  // One is switched to, the other has to give way to a new handle.
  EXPECT_DOUBLE_EQ(c->key,
                   options_.price_pages * (kSwitchCost + policy_.repoint_cost() + kMapCost));
}

}  // namespace
}  // namespace gpumemx
