// SPDX-License-Identifier: BSD-3-Clause
#include "core/block_map.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

namespace gpumemx {
namespace {

// Addresses so far apart that their tags are equal.
constexpr Bytes kSameTag{512ull << 32};

class BlockMapTest : public ::testing::Test {
 protected:
  Block* add(DeviceAddr at) {
    Block* block = blocks_.acquire();
    block->begin = at;
    map_.insert(at, block->id);
    return block;
  }
  void remove(Block* block) {
    map_.erase(block->begin, block->id);
    blocks_.release(block);
  }
  Slab<Block> blocks_;
  BlockMap map_;
};

TEST_F(BlockMapTest, FindsABlockByItsExactAddress) {
  Block* block = add({0x1000});
  EXPECT_EQ(map_.find({0x1000}, blocks_), block);
  EXPECT_EQ(map_.peek({0x1000}, blocks_), block);
  EXPECT_EQ(map_.find({0x1001}, blocks_), nullptr);  // the same granule
  EXPECT_EQ(map_.find({0x1200}, blocks_), nullptr);
  remove(block);
  EXPECT_EQ(map_.find({0x1000}, blocks_), nullptr);
  EXPECT_EQ(map_.peek({0x1000}, blocks_), nullptr);
}

TEST_F(BlockMapTest, TellsBlocksApartWhoseTagsAreEqual) {
  const DeviceAddr low{0x200000}, high = low + kSameTag, higher = high + kSameTag;
  Block* a = add(low);
  Block* b = add(high);
  Block* c = add(higher);
  EXPECT_EQ(map_.find(low, blocks_), a);
  EXPECT_EQ(map_.find(high, blocks_), b);
  EXPECT_EQ(map_.find(higher, blocks_), c);
  remove(b);
  EXPECT_EQ(map_.find(low, blocks_), a);
  EXPECT_EQ(map_.find(high, blocks_), nullptr);
  EXPECT_EQ(map_.find(higher, blocks_), c);
  remove(a);
  EXPECT_EQ(map_.find(higher, blocks_), c);
}

TEST_F(BlockMapTest, AgreesWithAnOrderedMapWhileItGrowsAndShrinks) {
  std::mt19937 random(1);
  std::map<std::uint64_t, Block*> model;
  const auto check = [&] {
    for (const auto& [at, block] : model) ASSERT_EQ(map_.find({at}, blocks_), block);
  };
  for (int round = 0; round < 6; ++round) {
    const std::size_t wanted = round % 2 == 0 ? 3000u << round : 40;
    while (model.size() < wanted) {
      // Few places, so that they lie together in the table and some tags are equal.
      const std::uint64_t at = random() % (wanted * 2) * kGranule.n + random() % 2 * kSameTag.n;
      if (model.contains(at)) continue;
      model[at] = add({at});
    }
    check();
    while (model.size() > wanted / 2) {
      auto it = model.lower_bound(random() % (wanted * 2) * kGranule.n);
      if (it == model.end()) it = model.begin();
      const std::uint64_t at = it->first;
      remove(it->second);
      model.erase(it);
      ASSERT_EQ(map_.find({at}, blocks_), nullptr);
      if (random() % 64 == 0 && model.size() < 200) check();
    }
    check();
  }
}

// Readers without a lock see a block, another one or none, but never anything else.
TEST_F(BlockMapTest, MayBePeekedAtWhileItChanges) {
  Block* stays = add({0x1000});
  std::atomic<bool> end{false};
  std::atomic<std::uint64_t> seen{0};
  std::thread reader([&] {
    while (!end.load()) {
      if (const Block* block = map_.peek({0x1000}, blocks_)) seen += block == stays ? 1 : 0;
    }
  });
  while (seen.load() == 0) std::this_thread::yield();
  std::vector<Block*> others;
  for (int round = 0; round < 20; ++round) {
    for (std::uint64_t i = 1; i < 3000; ++i) others.push_back(add({0x1000 + i * kGranule.n}));
    for (Block* block : others) remove(block);
    others.clear();
  }
  end.store(true);
  reader.join();
  EXPECT_EQ(map_.find({0x1000}, blocks_), stays);
}

using BlockMapDeathTest = BlockMapTest;

TEST_F(BlockMapDeathTest, ABlockThatIsNotThereCantEnd) {
  add({0x1000});
  EXPECT_DEATH(map_.erase({0x2000}, 7), "not in the table of blocks");
}

}  // namespace
}  // namespace gpumemx
