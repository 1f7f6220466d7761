// SPDX-License-Identifier: BSD-3-Clause
#include "core/arena.hpp"

#include <gtest/gtest.h>

#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

SimOptions with_addresses(Bytes size) {
  SimOptions options;
  options.address_space = size;
  return options;
}

class ArenaTest : public ::testing::Test {
 protected:
  Block* add_block(Region* region, DeviceAddr begin) {
    Block* b = blocks_.acquire();
    b->begin = begin;
    b->region = region;
    region->add_begin(*b);
    return b;
  }
  SimDriver gpu_;
  Slab<Block> blocks_;
};

TEST_F(ArenaTest, ReservesWhatItIsToldAndGivesItBack) {
  {
    Arena arena(gpu_, 16_GiB);
    EXPECT_EQ(arena.range().size, 16_GiB);
    EXPECT_EQ(arena.range().begin.n % kSlot.n, 0u);
  }
  EXPECT_TRUE(gpu_.empty());
}

TEST_F(ArenaTest, HalvesItsWishUntilTheDriverHasThatMuch) {
  SimDriver small(with_addresses(5_GiB));
  Arena arena(small, 64_GiB);
  EXPECT_EQ(arena.range().size, 4_GiB);
}

TEST_F(ArenaTest, HasNoAddressesWhenTheDriverHasNotEvenOneSlot) {
  SimDriver tiny(with_addresses(512_MiB));
  Arena arena(tiny, 64_GiB);
  EXPECT_EQ(arena.range().size, 0_B);
  EXPECT_EQ(arena.take(2_MiB, nullptr), nullptr);
  EXPECT_EQ(arena.region_of({1ull << 44}), nullptr);
}

TEST_F(ArenaTest, DoesNotTryAgainWhenTheFailureIsAnother) {
  gpu_.fail_always(DriverCall::kReserve);
  Arena arena(gpu_, 64_GiB);
  EXPECT_EQ(arena.range().size, 0_B);
  EXPECT_EQ(gpu_.meter().count(DriverCall::kReserve), 1u);
}

TEST_F(ArenaTest, OfNoSizeAsksForNothing) {
  Arena arena(gpu_, 0_B);
  EXPECT_EQ(gpu_.meter().count(DriverCall::kReserve), 0u);
}

TEST_F(ArenaTest, TakesWholeSlotsOneAfterTheOther) {
  Arena arena(gpu_, 8_GiB);
  Region* a = arena.take(1_B, nullptr);
  Region* b = arena.take(kSlot + 1_B, nullptr);
  EXPECT_EQ(a->range, (AddrRange{arena.range().begin, kSlot}));
  EXPECT_EQ(b->range, (AddrRange{arena.range().begin + kSlot, kSlot * 2}));
  EXPECT_EQ(b->mapped_end, b->range.begin);
  EXPECT_FALSE(b->plain);
  EXPECT_EQ(arena.region_of(b->range.begin + kSlot), b);
  EXPECT_EQ(arena.region_of(b->range.end() - 1_B), b);
  EXPECT_EQ(arena.region_of(b->range.end()), nullptr);
}

TEST_F(ArenaTest, RefusesWhenNoRunOfSlotsIsLongEnough) {
  Arena arena(gpu_, 4_GiB);
  EXPECT_EQ(arena.take(0_B, nullptr), nullptr);
  EXPECT_EQ(arena.take(5_GiB, nullptr), nullptr);
  Region* a = arena.take(1_GiB, nullptr);
  arena.take(1_GiB, nullptr);
  Region* c = arena.take(1_GiB, nullptr);
  arena.take(1_GiB, nullptr);
  EXPECT_EQ(arena.take(1_GiB, nullptr), nullptr);
  arena.give_back(a);
  arena.give_back(c);
  EXPECT_EQ(arena.take(2_GiB, nullptr), nullptr);  // two slots are free, but not together
  EXPECT_NE(arena.take(1_GiB, nullptr), nullptr);
}

TEST_F(ArenaTest, ReusesSlotsThatCameBackOnceItIsAtTheEnd) {
  Arena arena(gpu_, 4_GiB);
  Region* a = arena.take(1_GiB, nullptr);
  const DeviceAddr first = a->range.begin;
  arena.give_back(a);
  EXPECT_EQ(arena.region_of(first), nullptr);
  EXPECT_EQ(arena.take(1_GiB, nullptr)->range.begin, first + kSlot);  // goes on where it was
  arena.take(2_GiB, nullptr);
  EXPECT_EQ(arena.take(1_GiB, nullptr)->range.begin, first);
}

TEST_F(ArenaTest, ARegionOfSeveralSlotsComesBackWhole) {
  Arena arena(gpu_, 4_GiB);
  Region* a = arena.take(3_GiB, nullptr);
  const AddrRange range = a->range;
  arena.take(1_GiB, nullptr);
  arena.give_back(a);
  EXPECT_EQ(arena.region_of(range.end() - 1_B), nullptr);
  ASSERT_NE(a = arena.take(3_GiB, nullptr), nullptr);
  EXPECT_EQ(a->range, range);
}

TEST_F(ArenaTest, FindsABlockByTheAddressItBeginsAtOnly) {
  Arena arena(gpu_, 4_GiB);
  Region* r = arena.take(2_GiB, nullptr);
  const DeviceAddr begin = r->range.begin + 5_MiB;
  Block* b = add_block(r, begin);
  EXPECT_EQ(arena.find(begin, blocks_), b);
  EXPECT_EQ(arena.find_unlocked(begin, blocks_), b);
  EXPECT_EQ(arena.find(begin + 512_B, blocks_), nullptr);
  EXPECT_EQ(arena.find(begin + 1_B, blocks_), nullptr);
  EXPECT_EQ(arena.find(r->range.begin + kSlot, blocks_), nullptr);  // a slot without tables
  EXPECT_EQ(arena.find(r->range.end(), blocks_), nullptr);          // a slot of nobody
  EXPECT_EQ(arena.find({0}, blocks_), nullptr);
  EXPECT_EQ(arena.find({~0ull}, blocks_), nullptr);
  EXPECT_TRUE(r->has_begin(begin));
  r->remove_begin(*b);
  EXPECT_FALSE(r->has_begin(begin));
  EXPECT_EQ(arena.find(begin, blocks_), nullptr);
}

TEST_F(ArenaTest, ABlockCoversAddressesFarAwayAndInLaterSlots) {
  Arena arena(gpu_, 8_GiB);
  Region* r = arena.take(6_GiB, nullptr);
  Block* first = add_block(r, r->range.begin);
  Block* near = add_block(r, r->range.begin + 3_KiB);
  Block* third_slot = add_block(r, r->range.begin + kSlot * 2 + 700_MiB);
  const auto covering = [&](DeviceAddr a) { return r->block_covering(a, blocks_); };
  EXPECT_EQ(covering(r->range.begin), first);
  EXPECT_EQ(covering(r->range.begin + 3_KiB - 1_B), first);
  EXPECT_EQ(covering(near->begin), near);
  EXPECT_EQ(covering(near->begin + 600_MiB), near);
  EXPECT_EQ(covering(r->range.begin + kSlot), near);
  EXPECT_EQ(covering(third_slot->begin - 512_B), near);  // two slots on, one of them without tables
  EXPECT_EQ(covering(third_slot->begin), third_slot);
  EXPECT_EQ(covering(r->range.end() - 512_B), third_slot);
}

TEST_F(ArenaTest, FindsTheCoveringBlockAmongManyAtEveryDistance) {
  Arena arena(gpu_, 1_GiB);
  Region* r = arena.take(1_GiB, nullptr);
  std::vector<std::uint64_t> begins{0};
  for (std::uint64_t at = 1; at < 1u << 21; at = at * 3 + 1) begins.push_back(at);  // granules
  std::vector<Block*> blocks;
  for (const std::uint64_t at : begins)
    blocks.push_back(add_block(r, r->range.begin + kGranule * at));
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const std::uint64_t last = i + 1 < begins.size() ? begins[i + 1] - 1 : (1u << 21) - 1;
    for (const std::uint64_t at : {begins[i], (begins[i] + last) / 2, last}) {
      ASSERT_EQ(r->block_covering(r->range.begin + kGranule * at, blocks_), blocks[i]) << at;
    }
  }
  // With all but the first gone again, it covers everything.
  for (std::size_t i = 1; i < begins.size(); ++i) r->remove_begin(*blocks[i]);
  EXPECT_EQ(r->block_covering(r->range.end() - 512_B, blocks_), blocks[0]);
}

TEST_F(ArenaTest, PlainRegionsLieAnywhereAndAreFoundByAddress) {
  Arena arena(gpu_, 1_GiB);
  const AddrRange low{{0x7000200}, 20_MiB}, high{{0x90000000}, 2_MiB};
  Region* a = arena.add_plain(low, nullptr);
  Region* b = arena.add_plain(high, nullptr);
  Block* first = add_block(a, low.begin);
  Block* inner = add_block(a, low.begin + 3_MiB);
  EXPECT_TRUE(a->plain);
  EXPECT_EQ(a->mapped_end, low.end());
  EXPECT_EQ(arena.region_of(low.end() - 1_B), a);
  EXPECT_EQ(arena.region_of(low.end()), nullptr);
  EXPECT_EQ(arena.region_of(low.begin - 1_B), nullptr);
  EXPECT_EQ(arena.region_of(high.begin), b);
  EXPECT_EQ(arena.find(low.begin, blocks_), first);
  EXPECT_EQ(arena.find(low.begin + 3_MiB, blocks_), inner);
  EXPECT_EQ(arena.find(low.begin + 100_B, blocks_), nullptr);
  EXPECT_EQ(a->block_covering(low.end() - 512_B, blocks_), inner);
  EXPECT_EQ(a->block_covering(low.begin + 1_MiB, blocks_), first);
  EXPECT_EQ(arena.find_unlocked(low.begin, blocks_), nullptr);  // not of the reservation
  a->remove_begin(*first);
  a->remove_begin(*inner);
  arena.give_back(a);
  EXPECT_EQ(arena.region_of(low.begin), nullptr);
  EXPECT_EQ(arena.find(low.begin, blocks_), nullptr);
}

TEST_F(ArenaTest, KeepsMappingsByPageAndLowersMappedEnd) {
  Arena arena(gpu_, 2_GiB);
  Region* r = arena.take(2_GiB, nullptr);
  Mapping m;
  const DeviceAddr page = r->range.begin + kSlot + 4_MiB;
  EXPECT_EQ(r->mapping_at(page), nullptr);
  r->set_mapping({page, kPage}, &m);
  EXPECT_EQ(r->mapping_at(page), &m);
  EXPECT_EQ(r->mapping_at(page + kPage - 1_B), &m);
  EXPECT_EQ(r->mapping_at(page + kPage), nullptr);
  r->mapped_end = page + 10_MiB;
  r->tighten_mapped_end(r->range.begin);
  EXPECT_EQ(r->mapped_end, page + kPage);
  r->set_mapping({page, kPage}, nullptr);
  r->tighten_mapped_end(r->range.begin + kSlot);  // the floor
  EXPECT_EQ(r->mapped_end, r->range.begin + kSlot);
}

using ArenaDeathTest = ArenaTest;

TEST_F(ArenaDeathTest, AnAddressThatNoBlockCoversMeansDamagedBooks) {
  Arena arena(gpu_, 2_GiB);
  Region* r = arena.take(2_GiB, nullptr);
  add_block(r, r->range.begin + 1_MiB);
  EXPECT_DEATH((void)r->block_covering(r->range.begin, blocks_), "belongs to no block");
}

TEST(BlockState, EachHasItsName) {
  EXPECT_STREQ(to_string(BlockState::kVoid), "void");
  EXPECT_STREQ(to_string(BlockState::kReady), "ready");
  EXPECT_STREQ(to_string(BlockState::kFilling), "filling");
  EXPECT_STREQ(to_string(BlockState::kLive), "live");
  EXPECT_STREQ(to_string(BlockState::kPending), "pending");
  EXPECT_STREQ(to_string(BlockState{99}), "unknown");
}

}  // namespace
}  // namespace gpumemx
