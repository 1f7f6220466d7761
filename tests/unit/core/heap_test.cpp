// SPDX-License-Identifier: BSD-3-Clause
#include "core/heap.hpp"

#include <gtest/gtest.h>

#include "unit/core/heap_tools.hpp"

namespace gpumemx {
namespace {

using HeapTest = HeapFixture;

TEST_F(HeapTest, ASetMakesEachHeapOnceAtFirstUse) {
  EXPECT_EQ(set_.heap_if_any(HeapKind::kRest), nullptr);
  Heap& made = heap();
  EXPECT_EQ(&heap(), &made);
  EXPECT_EQ(set_.heap_if_any(HeapKind::kRest), &made);
  EXPECT_EQ(set_.heap_if_any(HeapKind::kBig), nullptr);
  EXPECT_EQ(made.kind(), HeapKind::kRest);
  EXPECT_EQ(&made.set(), &set_);
}

TEST_F(HeapTest, RegionsBeginAt4GiBAndGrowWithTheHeap) {
  Heap& h = heap();
  ASSERT_TRUE(h.open_end(1_MiB));
  ASSERT_TRUE(h.open_end(3_GiB));  // still in the first region
  ASSERT_EQ(h.regions().size(), 1u);
  EXPECT_EQ(h.regions()[0]->range.size, 4_GiB);
  ASSERT_TRUE(h.open_end(6_GiB));
  EXPECT_EQ(h.regions()[1]->range.size, 12_GiB);  // twice the request
  ASSERT_TRUE(h.open_end(13_GiB));
  EXPECT_EQ(h.regions()[2]->range.size, 26_GiB);
  EXPECT_FALSE(h.open_end(27_GiB));  // of 64 GiB, 22 are left
}

TEST_F(HeapTest, ARegionIsAsLargeAsTheRequestWhenNoMoreIsLeft) {
  Heap& h = heap();
  ASSERT_TRUE(h.open_end(1_MiB));
  ASSERT_TRUE(h.open_end(31_GiB));  // 60 GiB are left: not twice that
  EXPECT_EQ(h.regions()[1]->range.size, 31_GiB);
}

TEST_F(HeapTest, TakeCutsAReadyBlockAndGiveMergesItAgain) {
  Heap& h = heap();
  Block* whole = ready(h, {4});
  const DeviceAddr at = whole->begin;
  Block* middle = h.take(whole, at + 1_MiB, 3_MiB);
  EXPECT_EQ(middle->begin, at + 1_MiB);
  EXPECT_EQ(middle->size, 3_MiB);
  EXPECT_EQ(middle->state, BlockState::kLive);
  EXPECT_EQ(middle->prev->size, 1_MiB);
  EXPECT_EQ(middle->next->size, 4_MiB);
  EXPECT_EQ(broken(h), "");
  h.give(middle, {&line_, 1});
  Block* again = block_at(h, at);
  EXPECT_EQ(again->begin, at);
  EXPECT_EQ(again->size, 8_MiB);
  EXPECT_EQ(again->state, BlockState::kReady);
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, AHandleIsIdleExactlyWhileNothingStandsOnIt) {
  Heap& h = heap();
  Block* whole = ready(h, {1, 1});
  const DeviceAddr at = whole->begin;
  Handle *low = handle_at(at), *high = handle_at(at + kPage);
  EXPECT_EQ(low->idle_list, &set_.idle);
  EXPECT_EQ(high->idle_list, &set_.idle);
  Block* a = h.take(whole, at, 1_MiB);                                    // on low
  Block* b = h.take(block_at(h, at + 1_MiB), at + 1_MiB, 1_MiB + 512_B);  // on both
  EXPECT_EQ(low->home->uses, 2u);
  EXPECT_EQ(high->home->uses, 1u);
  EXPECT_EQ(set_.idle.bytes(), 0_B);
  h.give(a, {&line_, 3});
  EXPECT_EQ(low->idle_list, nullptr);
  h.give(b, {&line_, 4});
  EXPECT_EQ(low->idle_list, &set_.idle);
  EXPECT_EQ(low->last_use.epoch, 4u);
  EXPECT_EQ(low->home->last_use.timeline, &line_);
  EXPECT_EQ(set_.idle.bytes(), 4_MiB);
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, HeldBytesAreTheFreeBytesOnHandlesInUse) {
  Heap& h = heap();
  Block* whole = ready(h, {1, 2, 1});
  const DeviceAddr at = whole->begin;
  EXPECT_EQ(held(), 0);
  Block* a = h.take(whole, at, 512_KiB);
  EXPECT_EQ(a->next->held, 1536_KiB);  // the rest of the first page; the others are idle
  Block* b = h.take(a->next, at + 8_MiB - 1_MiB, 1_MiB);
  EXPECT_EQ(a->next->held, 2560_KiB);  // and the rest of the last page
  EXPECT_EQ(held(), n(2560_KiB));
  EXPECT_EQ(books_.stats.inactive_split.all().current, 1);
  Block* c = h.take(a->next, at + 3_MiB, 1_MiB);
  EXPECT_EQ(a->next->held, 2560_KiB);  // 1.5 of the first page and 1 of the handle in the middle
  EXPECT_EQ(c->next->held, 3_MiB);     // 2 of that handle and 1 of the last page
  EXPECT_EQ(books_.stats.inactive_split.all().current, 2);
  h.give(a, {});
  h.give(c, {});
  h.give(b, {});
  EXPECT_EQ(held(), 0);
  EXPECT_EQ(books_.stats.inactive_split.all().current, 0);
  EXPECT_EQ(books_.stats.inactive_split_bytes.all().allocated,
            books_.stats.inactive_split_bytes.all().freed());
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, ASegmentIsARunOfPagesThatHaveTheirMemory) {
  Heap& h = heap();
  Block* whole = ready(h, {1, 1, 1});
  EXPECT_EQ(segments(), 1);
  Handle* middle = handle_at(whole->begin + kPage);
  set_.idle.remove(middle);
  Heap::leave_home(middle);
  EXPECT_EQ(segments(), 2);
  Handle* low = handle_at(h.regions()[0]->range.begin);
  set_.idle.remove(low);
  Heap::leave_home(low);
  EXPECT_EQ(segments(), 1);
  set_.idle.push(middle);
  h.make_home(middle->aliases);
  EXPECT_EQ(segments(), 1);  // touches the last one only
  set_.idle.push(low);
  h.make_home(low->aliases);
  EXPECT_EQ(segments(), 1);
  EXPECT_EQ(books_.stats.segment.all().allocated - books_.stats.segment.all().freed(), 1);
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, WhereAHandleStoodIsVoidAndADormantAlias) {
  Heap& h = heap();
  Block* whole = ready(h, {1, 1});
  const DeviceAddr at = whole->begin;
  Handle* low = handle_at(at);
  set_.idle.remove(low);
  Heap::leave_home(low);
  set_.idle.push(low);
  EXPECT_EQ(low->home, nullptr);
  EXPECT_EQ(low->alias_count, 1u);
  EXPECT_EQ(books_.stats.dormant_aliases, 1u);
  EXPECT_EQ(block_at(h, at)->state, BlockState::kVoid);
  EXPECT_EQ(block_at(h, at)->size, 2_MiB);
  EXPECT_EQ(block_at(h, at + kPage)->state, BlockState::kReady);
  EXPECT_EQ(handle_at(at), low);  // still mapped
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, AnAliasBecomesHomeAgainAndTheOtherPlaceVoid) {
  Heap& here = heap(HeapKind::kRest);
  Heap& there = other_set_.heap(HeapKind::kSmall, books_);
  Block* first = ready(here, {1});
  const DeviceAddr old_place = first->begin;
  Handle* handle = handle_at(old_place);
  books_.stats.reserved_bytes.add(false, handle->size().n);
  // It moves to the other heap ...
  set_.idle.remove(handle);
  Heap::leave_home(handle);
  ASSERT_TRUE(there.open_end(1_MiB));
  const DeviceAddr new_place = there.regions()[0]->range.begin;
  Block* filling = there.begin_fill(new_place, new_place + kPage);
  there.install(filling, handle, new_place);
  there.give(there.finish_fill(filling, new_place, 1_MiB), {});
  EXPECT_TRUE(handle->small);
  EXPECT_EQ(books_.stats.reserved_bytes.part[StatArray::kSmall].current, n(2_MiB));
  EXPECT_EQ(handle->idle_list, &other_set_.idle);
  // ... and comes back by its alias.
  Mapping* alias = books_.arena.region_of(old_place)->mapping_at(old_place);
  EXPECT_FALSE(alias->is_home());
  here.make_home(alias);
  EXPECT_TRUE(alias->is_home());
  EXPECT_EQ(handle->idle_list, &set_.idle);
  EXPECT_FALSE(handle->small);
  EXPECT_EQ(books_.stats.reserved_bytes.part[StatArray::kLarge].current, n(2_MiB));
  EXPECT_EQ(block_at(here, old_place)->state, BlockState::kReady);
  EXPECT_EQ(block_at(there, new_place)->state, BlockState::kVoid);
  EXPECT_EQ(books_.stats.dormant_aliases, 1u);
  EXPECT_EQ(broken(here), "");
  EXPECT_EQ(broken(there), "");
}

TEST_F(HeapTest, AForgottenAliasIsGoneFromTheTables) {
  Heap& h = heap();
  Block* whole = ready(h, {2});
  const DeviceAddr at = whole->begin;
  Handle* handle = handle_at(at);
  set_.idle.remove(handle);
  Heap::leave_home(handle);
  Heap::forget(handle->aliases, books_);
  EXPECT_EQ(books_.stats.dormant_aliases, 0u);
  EXPECT_EQ(handle->alias_count, 0u);
  EXPECT_EQ(h.mapping_at(h.regions()[0], at), nullptr);
  EXPECT_EQ(h.mapping_at(h.regions()[0], at + kPage), nullptr);
  EXPECT_EQ(h.mapping_at(h.regions()[0], h.regions()[0]->range.end()), nullptr);
  EXPECT_TRUE(h.empty());
  h.close();
  EXPECT_TRUE(h.regions().empty());
  EXPECT_EQ(books_.arena.region_of(at), nullptr);
}

TEST_F(HeapTest, IsNotEmptyWhileABlockOrAMappingIsThere) {
  Heap& h = heap();
  EXPECT_TRUE(h.empty());
  ASSERT_TRUE(h.open_end(1_MiB));
  EXPECT_TRUE(h.empty());
  Block* block = fill(h, 2_MiB, {1});
  EXPECT_FALSE(h.empty());
  Handle* handle = handle_at(block->begin);
  h.give(block, {});
  EXPECT_FALSE(h.empty());
  set_.idle.remove(handle);
  Heap::leave_home(handle);
  EXPECT_FALSE(h.empty());  // a dormant alias
}

TEST_F(HeapTest, TheOpenEndLiesBeyondDormantAliases) {
  Heap& h = heap();
  ready(h, {1, 1, 1});
  Region* region = h.regions()[0];
  for (int i = 0; i < 3; ++i) {
    Handle* handle = handle_at(region->range.begin + kPage * static_cast<std::uint64_t>(i));
    set_.idle.remove(handle);
    Heap::leave_home(handle);
  }
  EXPECT_EQ(region->first->state, BlockState::kVoid);
  ASSERT_TRUE(h.open_end(2_MiB));
  EXPECT_EQ(region->mapped_end, region->range.begin + 6_MiB);
  Mapping* last = region->mapping_at(region->range.begin + 4_MiB);
  Heap::forget(last, books_);
  ASSERT_TRUE(h.open_end(2_MiB));
  EXPECT_EQ(region->mapped_end, region->range.begin + 4_MiB);
}

TEST_F(HeapTest, AFillUsesWhatIsReadyAndAddsWhatWasMapped) {
  Heap& h = heap();
  Block* whole = ready(h, {1});
  const DeviceAddr at = whole->begin;
  Block* filling = h.begin_fill(at + 1_MiB, at + 4_MiB);  // 1 MiB that is ready, 2 MiB that are not
  EXPECT_EQ(filling->state, BlockState::kFilling);
  EXPECT_EQ(filling->size, 3_MiB);
  EXPECT_EQ(handle_at(at)->idle_list, nullptr);
  EXPECT_EQ(broken(h), "");
  h.install(filling, new_handle(1), at + 2_MiB);
  Block* block = h.finish_fill(filling, at + 1_MiB, 2_MiB);
  EXPECT_EQ(block->begin, at + 1_MiB);
  EXPECT_EQ(block->size, 2_MiB);
  EXPECT_EQ(block->state, BlockState::kLive);
  EXPECT_EQ(block->prev->state, BlockState::kReady);
  EXPECT_EQ(block->next->size, 1_MiB);
  EXPECT_EQ(block->next->held, 1_MiB);
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, AFillCanLeaveMemoryOnBothSidesOfTheBlock) {
  Heap& h = heap();
  ASSERT_TRUE(h.open_end(8_MiB));
  const DeviceAddr at = h.regions()[0]->range.begin;
  Block* filling = h.begin_fill(at, at + 8_MiB);
  h.install(filling, new_handle(4), at);
  Block* block = h.finish_fill(filling, at + 1_MiB, 2_MiB);
  EXPECT_EQ(block->prev->begin, at);
  EXPECT_EQ(block->prev->size, 1_MiB);
  EXPECT_EQ(block->next->size, 5_MiB);
  EXPECT_EQ(held(), n(6_MiB));
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, ACancelledFillKeepsWhatWasMappedAsFreeMemory) {
  Heap& h = heap();
  Block* whole = ready(h, {1});
  const DeviceAddr at = whole->begin;
  Block* filling = h.begin_fill(at + 1_MiB, at + 8_MiB);
  h.install(filling, new_handle(1), at + 4_MiB);  // not what lies at 2 and at 6 MiB
  h.cancel_fill(filling);
  EXPECT_EQ(block_at(h, at)->size, 2_MiB);
  EXPECT_EQ(block_at(h, at)->state, BlockState::kReady);
  EXPECT_EQ(block_at(h, at + 2_MiB)->state, BlockState::kVoid);
  EXPECT_EQ(block_at(h, at + 2_MiB)->size, 2_MiB);
  EXPECT_EQ(block_at(h, at + 4_MiB)->state, BlockState::kReady);
  EXPECT_EQ(block_at(h, at + 6_MiB)->state, BlockState::kVoid);
  EXPECT_EQ(block_at(h, at + 6_MiB)->end(), h.regions()[0]->range.end());
  EXPECT_EQ(set_.idle.bytes(), 4_MiB);
  EXPECT_EQ(segments(), 2);
  EXPECT_EQ(broken(h), "");
}

TEST_F(HeapTest, APlainSegmentIsOneReadyBlockThatNeverMoves) {
  Heap& h = heap(HeapKind::kPlainLarge);
  const AddrRange range{{0x7f0000200000}, 20_MiB};
  Handle* segment = books_.handles.add(HandleId{}, 10);
  h.add_segment(range, segment);
  EXPECT_TRUE(segment->pinned);
  EXPECT_EQ(segments(), 1);
  Block* block = block_at(h, range.begin);
  EXPECT_EQ(block->size, 20_MiB);
  EXPECT_EQ(block->held, 0_B);
  Block* live = h.take(block, range.begin, 3_MiB);
  EXPECT_EQ(held(), n(17_MiB));
  EXPECT_EQ(broken(h), "");
  h.give(live, {&line_, 1});
  EXPECT_EQ(segment->idle_list, nullptr);
  EXPECT_EQ(h.drop_segment(segment), range);
  EXPECT_EQ(segments(), 0);
  EXPECT_TRUE(h.regions().empty());
  EXPECT_EQ(h.free().first_from(0), nullptr);
  EXPECT_EQ(books_.arena.region_of(range.begin), nullptr);
}

TEST_F(HeapTest, HistoryHasTheSegmentsThatComeAndGo) {
  books_.history.reset(10, nullptr);
  Heap& h = heap(HeapKind::kPlainLarge);
  const AddrRange range{{0x7f0000200000}, 20_MiB};
  Handle* segment = books_.handles.add(HandleId{}, 10);
  h.add_segment(range, segment);
  h.drop_segment(segment);
  Block* block = fill(heap(), 2_MiB, {1});
  ASSERT_EQ(books_.history.events().size(), 3u);
  EXPECT_EQ(books_.history.events()[0].kind, EventKind::kSegmentAlloc);
  EXPECT_EQ(books_.history.events()[0].address, range.begin);
  EXPECT_EQ(books_.history.events()[0].size, 20_MiB);
  EXPECT_EQ(books_.history.events()[0].stream.id, StreamId{1});
  EXPECT_EQ(books_.history.events()[1].kind, EventKind::kSegmentFree);
  EXPECT_EQ(books_.history.events()[2].kind, EventKind::kSegmentMap);
  EXPECT_EQ(books_.history.events()[2].address, block->begin);
}

// validate() is what the random programs trust: each invariant broken by hand.

TEST_F(HeapTest, ValidateSeesBlocksThatDoNotTile) {
  Heap& h = heap();
  Block* block = fill(h, 1_MiB, {1});
  block->size = 512_KiB;
  EXPECT_EQ(broken(h), "(1) the blocks do not tile the region");
}

TEST_F(HeapTest, ValidateSeesABlockThatIsMissingFromTheTable) {
  Heap& h = heap();
  Block* block = fill(h, 1_MiB, {1});
  block->region->remove_begin(*block);
  EXPECT_EQ(broken(h), "(1) a block is missing from the table");
}

TEST_F(HeapTest, ValidateSeesAWrongLastBlock) {
  Heap& h = heap();
  Block* block = fill(h, 1_MiB, {1});
  block->region->last = block;
  EXPECT_EQ(broken(h), "(1) the last block is not last");
}

TEST_F(HeapTest, ValidateSeesFreeNeighboursThatWereNotMerged) {
  Heap& h = heap();
  Block* block = fill(h, 1_MiB, {1});
  block->state = BlockState::kReady;
  block->held = 1_MiB;
  EXPECT_EQ(broken(h), "(2) two free neighbours were not merged");
}

TEST_F(HeapTest, ValidateSeesMemoryThatIsMissingUnderALiveBlock) {
  Heap& h = heap();
  Block* block = fill(h, 2_MiB, {1});
  handle_at(block->begin)->home = nullptr;
  EXPECT_EQ(broken(h), "(3) memory stands wrongly behind a block that is live");
}

TEST_F(HeapTest, ValidateSeesAMappingBeyondMappedEnd) {
  Heap& h = heap();
  Block* block = fill(h, 4_MiB, {1, 1});
  block->region->mapped_end = block->begin + 2_MiB;
  EXPECT_EQ(broken(h), "a mapping lies beyond mapped_end");
}

TEST_F(HeapTest, ValidateSeesWrongHeldBytes) {
  Heap& h = heap();
  Block* block = fill(h, 1_MiB, {1});
  block->next->held = 512_B;
  EXPECT_EQ(broken(h), "the held bytes of a free block are wrong");
}

TEST_F(HeapTest, ValidateSeesWrongUses) {
  Heap& h = heap();
  Block* block = fill(h, 1_MiB, {1});
  handle_at(block->begin)->home->uses = 2;
  EXPECT_EQ(broken(h), "(4) a mapping's uses are not the blocks that touch it");
}

TEST_F(HeapTest, ValidateSeesAHandleThatIsIdleAndInUse) {
  Heap& h = heap();
  Block* block = fill(h, 1_MiB, {1});
  set_.idle.push(handle_at(block->begin));
  EXPECT_EQ(broken(h), "(5) a handle is idle and in use");
}

TEST_F(HeapTest, ValidateSeesAnIdleHandleInAnotherSetsList) {
  Heap& h = heap();
  Block* block = ready(h, {1});
  Handle* handle = handle_at(block->begin);
  set_.idle.remove(handle);
  other_set_.idle.push(handle);
  EXPECT_EQ(broken(h), "(5) an idle handle waits in another heap set's list");
}

}  // namespace
}  // namespace gpumemx
