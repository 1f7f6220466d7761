// SPDX-License-Identifier: BSD-3-Clause
#include "core/free_index.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>

namespace gpumemx {
namespace {

class FreeIndexTest : public ::testing::Test {
 protected:
  Block* add(std::uint64_t begin, Bytes size, BlockState state = BlockState::kReady) {
    Block& b = blocks_.emplace_back();
    b.begin = {begin};
    b.size = size;
    b.state = state;
    index_.insert(&b);
    return &b;
  }
  std::vector<const Block*> from(Bytes size) const {
    std::vector<const Block*> out;
    for (const Block* b = index_.first_from(bin_of(size)); b != nullptr; b = index_.after(b)) {
      out.push_back(b);
    }
    return out;
  }
  std::deque<Block> blocks_;
  FreeIndex index_;
};

TEST_F(FreeIndexTest, IsEmptyAtFirst) {
  EXPECT_EQ(index_.first_from(0), nullptr);
  EXPECT_EQ(index_.first_from(kBins + 100), nullptr);
  EXPECT_EQ(index_.voids(), nullptr);
}

TEST_F(FreeIndexTest, WalksFromTheFirstBinThatCanHoldTheSizeUpwards) {
  const Block* small = add(0x10000, 1_KiB);
  const Block* large = add(0x20000, 1_GiB);
  const Block* middle = add(0x30000, 64_KiB);
  EXPECT_EQ(from(512_B), (std::vector{small, middle, large}));
  EXPECT_EQ(from(2_KiB), (std::vector{middle, large}));
  EXPECT_EQ(from(2_MiB), (std::vector{large}));
  EXPECT_TRUE(from(2_GiB).empty());
}

TEST_F(FreeIndexTest, GivesBlocksOfOneBinByAddress) {
  const Block* c = add(0x3000, 4_KiB);
  const Block* a = add(0x1000, 4_KiB);
  const Block* b = add(0x2000, 4_KiB);
  EXPECT_EQ(from(4_KiB), (std::vector{a, b, c}));
}

TEST_F(FreeIndexTest, SortsTheFirstSixteenOfABinOnly) {
  for (std::uint64_t n = 1; n <= 20; ++n) add(n * 0x1000, 4_KiB);
  const auto order = from(4_KiB);
  ASSERT_EQ(order.size(), 20u);
  for (std::size_t i = 1; i < 16; ++i) EXPECT_LT(order[i - 1]->begin, order[i]->begin) << i;
}

TEST_F(FreeIndexTest, VoidBlocksAreInAListOfTheirOwn) {
  const Block* first = add(0x200000, 2_MiB, BlockState::kVoid);
  const Block* second = add(0x800000, 4_MiB, BlockState::kVoid);
  EXPECT_TRUE(from(512_B).empty());
  EXPECT_EQ(index_.voids(), second);
  EXPECT_EQ(second->list_next, first);
  EXPECT_EQ(first->list_next, nullptr);
}

TEST_F(FreeIndexTest, RemovesFromTheFrontTheMiddleAndTheEnd) {
  Block* a = add(0x1000, 4_KiB);
  Block* b = add(0x2000, 4_KiB);
  Block* c = add(0x3000, 4_KiB);
  Block* v = add(0x200000, 2_MiB, BlockState::kVoid);
  index_.remove(b);
  EXPECT_EQ(from(512_B), (std::vector<const Block*>{a, c}));
  index_.remove(a);
  EXPECT_EQ(from(512_B), (std::vector<const Block*>{c}));
  index_.remove(c);
  EXPECT_EQ(index_.first_from(0), nullptr);
  index_.remove(v);
  EXPECT_EQ(index_.voids(), nullptr);
}

TEST_F(FreeIndexTest, AgreesWithAPlainListUnderManyInsertsAndRemoves) {
  std::mt19937 random(5);
  std::vector<Block*> in;
  for (int step = 0; step < 20000; ++step) {
    if (in.size() < 50 && random() % 2 == 0) {
      in.push_back(add(0x1000u * (random() % 100000 + 1), kGranule * (1ull << (random() % 30))));
    } else if (!in.empty()) {
      const std::size_t at = random() % in.size();
      index_.remove(in[at]);
      in.erase(in.begin() + static_cast<std::ptrdiff_t>(at));
    }
    const Bytes size = kGranule * (1ull << (random() % 31));
    const auto fits = std::count_if(
        in.begin(), in.end(), [&](const Block* b) { return bin_of(b->size) >= bin_of(size); });
    ASSERT_EQ(from(size).size(), static_cast<std::size_t>(fits));
  }
}

}  // namespace
}  // namespace gpumemx
