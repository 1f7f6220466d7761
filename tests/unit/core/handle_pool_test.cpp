// SPDX-License-Identifier: BSD-3-Clause
#include "core/handle_pool.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

class HandlePoolTest : public ::testing::Test {
 protected:
  Mapping* map(Handle* handle, std::uint64_t begin) {
    return pool_.add_mapping(handle, &region_, {begin});
  }
  BlockMap map_;
  Region region_{{{1ull << 40}, 1_GiB}, nullptr, map_, /*plain=*/true};
  HandlePool pool_;
  Timeline line_{{{StreamId{1}, 0}, true}};
};

using IdleListTest = HandlePoolTest;

TEST_F(IdleListTest, KeepsTheOneIdleLongestInFrontOfEachSize) {
  IdleList list;
  Handle* a = pool_.add(HandleId{1}, 4);
  Handle* b = pool_.add(HandleId{2}, 4);
  Handle* c = pool_.add(HandleId{3}, 32);
  for (Handle* h : {a, b, c}) list.push(h);
  EXPECT_EQ(list.front(4), a);
  EXPECT_EQ(a->idle_next, b);
  EXPECT_EQ(list.front(32), c);
  EXPECT_EQ(list.front(1), nullptr);
  EXPECT_EQ(list.sizes(), 1ull << 4 | 1ull << 32);
  EXPECT_EQ(list.bytes(), 80_MiB);
  EXPECT_EQ(c->idle_list, &list);
}

TEST_F(IdleListTest, RemovesFromAnywhereAndForgetsEmptySizes) {
  IdleList list;
  Handle* h[4];
  for (Handle*& one : h) list.push(one = pool_.add(HandleId{1}, 2));
  list.remove(h[1]);
  list.remove(h[0]);
  EXPECT_EQ(list.front(2), h[2]);
  list.remove(h[3]);
  EXPECT_EQ(h[2]->idle_next, nullptr);
  list.push(h[0]);
  EXPECT_EQ(h[2]->idle_next, h[0]);
  list.remove(h[2]);
  list.remove(h[0]);
  EXPECT_EQ(list.sizes(), 0u);
  EXPECT_EQ(list.bytes(), 0_B);
  EXPECT_EQ(h[0]->idle_list, nullptr);
}

TEST_F(IdleListTest, VisitsSmallestFirstAndMayLoseTheVisitedOne) {
  IdleList list;
  for (const std::uint32_t pages : {8u, 1u, 32u, 1u}) list.push(pool_.add(HandleId{1}, pages));
  std::vector<std::uint32_t> seen;
  list.for_each([&](Handle* h) {
    seen.push_back(h->pages);
    list.remove(h);
  });
  EXPECT_EQ(seen, (std::vector<std::uint32_t>{1, 1, 8, 32}));
  EXPECT_EQ(list.bytes(), 0_B);
}

TEST_F(HandlePoolTest, CountsHandlesAndMappings) {
  Handle* h = pool_.add(HandleId{9}, 4);
  EXPECT_EQ(h->driver, HandleId{9});
  EXPECT_EQ(h->size(), 8_MiB);
  map(h, 0x200000);
  map(h, 0x40000000);
  EXPECT_EQ(h->alias_count, 2u);
  EXPECT_EQ(pool_.handles(), 1u);
  EXPECT_EQ(pool_.mappings(), 2u);
  pool_.remove_mapping(h->aliases);
  pool_.remove_mapping(h->aliases);
  EXPECT_EQ(h->aliases, nullptr);
  pool_.remove(h);
  EXPECT_EQ(pool_.handles(), 0u);
  EXPECT_EQ(pool_.mappings(), 0u);
}

TEST_F(HandlePoolTest, RemovesAMappingFromTheMiddleOfItsHandlesList) {
  Handle* h = pool_.add(HandleId{1}, 1);
  Mapping* first = map(h, 0x200000);
  Mapping* second = map(h, 0x400000);
  Mapping* third = map(h, 0x600000);
  EXPECT_EQ(h->aliases, third);
  pool_.remove_mapping(second);
  EXPECT_EQ(h->aliases, third);
  EXPECT_EQ(third->next_alias, first);
  EXPECT_EQ(h->alias_count, 2u);
}

TEST_F(HandlePoolTest, AMappingKnowsItsPlaceAndWhetherItIsHome) {
  Handle* h = pool_.add(HandleId{1}, 2);
  Mapping* m = map(h, 0x200000);
  EXPECT_FALSE(m->is_home());
  h->home = m;
  EXPECT_TRUE(m->is_home());
  EXPECT_EQ(m->size(), 4_MiB);
  EXPECT_EQ(m->end(), (DeviceAddr{0x600000}));
  EXPECT_FALSE(h->busy());
  m->uses = 1;
  EXPECT_TRUE(h->busy());
}

TEST_F(HandlePoolTest, FindsHandlesByNumberUntilTheyAreGone) {
  Handle* a = pool_.add(HandleId{1}, 1);
  Handle* b = pool_.add(HandleId{2}, 1);
  const std::uint32_t id = a->id;
  EXPECT_EQ(pool_.find(id), a);
  pool_.remove(a);
  EXPECT_EQ(pool_.find(id), nullptr);
  std::vector<Handle*> seen;
  pool_.for_each([&](Handle* h) { seen.push_back(h); });
  EXPECT_EQ(seen, (std::vector{b}));
}

TEST_F(HandlePoolTest, TheOldestAliasThatCanGoIsNeitherHomeNorInUse) {
  Handle* h = pool_.add(HandleId{1}, 1);
  Mapping* running = map(h, 0x200000);
  Mapping* old = map(h, 0x400000);
  Mapping* young = map(h, 0x600000);
  h->home = map(h, 0x800000);
  running->last_use = {&line_, 1};
  EXPECT_EQ(oldest_droppable(*h), old);
  pool_.remove_mapping(old);
  EXPECT_EQ(oldest_droppable(*h), young);
  pool_.remove_mapping(young);
  EXPECT_EQ(oldest_droppable(*h), nullptr);
  line_.reached(1);
  EXPECT_EQ(oldest_droppable(*h), running);
}

TEST_F(HandlePoolTest, SerialNumbersOnlyGrow) {
  const std::uint64_t first = pool_.next_serial();
  EXPECT_EQ(pool_.next_serial(), first + 1);
}

using HandlePoolDeathTest = HandlePoolTest;

TEST_F(HandlePoolDeathTest, AHandleIsIdleInOneListOnly) {
  IdleList one, other;
  Handle* h = pool_.add(HandleId{1}, 1);
  one.push(h);
  EXPECT_DEATH(other.push(h), "became idle twice");
  EXPECT_DEATH(other.remove(h), "not idle was taken");
}

TEST_F(HandlePoolDeathTest, AHandleThatStandsSomewhereIsNotRemoved) {
  Handle* h = pool_.add(HandleId{1}, 1);
  map(h, 0x200000);
  EXPECT_DEATH(pool_.remove(h), "while it stands somewhere");
}

}  // namespace
}  // namespace gpumemx
