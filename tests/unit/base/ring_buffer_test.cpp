// SPDX-License-Identifier: BSD-3-Clause
#include "base/ring_buffer.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

std::vector<int> all(const RingBuffer<int>& ring) {
  std::vector<int> out;
  for (std::size_t i = 0; i < ring.size(); ++i) out.push_back(ring[i]);
  return out;
}

TEST(RingBuffer, KeepsTheOrderWhileItIsNotFull) {
  RingBuffer<int> ring;
  ring.reset(3);
  ring.push(1);
  ring.push(2);
  EXPECT_EQ(all(ring), (std::vector<int>{1, 2}));
  EXPECT_EQ(ring.capacity(), 3u);
  EXPECT_EQ(ring.overwritten(), 0u);
}

TEST(RingBuffer, OverwritesTheOldestWhenItIsFull) {
  RingBuffer<int> ring;
  ring.reset(3);
  for (int i = 1; i <= 3; ++i) ring.push(i);
  EXPECT_EQ(all(ring), (std::vector<int>{1, 2, 3}));
  ring.push(4);
  EXPECT_EQ(all(ring), (std::vector<int>{2, 3, 4}));
  for (int i = 5; i <= 8; ++i) ring.push(i);
  EXPECT_EQ(all(ring), (std::vector<int>{6, 7, 8}));
  EXPECT_EQ(ring.overwritten(), 5u);
}

TEST(RingBuffer, OfOneHoldsTheNewest) {
  RingBuffer<int> ring;
  ring.reset(1);
  ring.push(1);
  ring.push(2);
  EXPECT_EQ(all(ring), (std::vector<int>{2}));
}

TEST(RingBuffer, ResetDropsEverythingAndChangesTheLength) {
  RingBuffer<int> ring;
  ring.reset(2);
  for (int i = 0; i < 5; ++i) ring.push(i);
  ring.reset(4);
  EXPECT_EQ(ring.size(), 0u);
  EXPECT_EQ(ring.overwritten(), 0u);
  for (int i = 7; i < 12; ++i) ring.push(i);
  EXPECT_EQ(all(ring), (std::vector<int>{8, 9, 10, 11}));
}

TEST(RingBuffer, GoesOnOverItsChunksAndWithoutALimit) {
  RingBuffer<int> bounded, endless;
  bounded.reset(2500);
  endless.reset(~std::size_t{0});
  for (int i = 0; i < 40000; ++i) {
    bounded.push(i);
    endless.push(i);
  }
  ASSERT_EQ(bounded.size(), 2500u);
  ASSERT_EQ(endless.size(), 40000u);
  for (int i = 0; i < 2500; ++i) ASSERT_EQ(bounded[static_cast<std::size_t>(i)], 37500 + i);
  for (int i = 0; i < 40000; ++i) ASSERT_EQ(endless[static_cast<std::size_t>(i)], i);
  EXPECT_EQ(endless.overwritten(), 0u);
}

TEST(RingBuffer, ResizeKeepsTheNewest) {
  RingBuffer<int> ring;
  ring.reset(4);
  for (int i = 1; i <= 6; ++i) ring.push(i);
  ring.resize(4);
  EXPECT_EQ(all(ring), (std::vector<int>{3, 4, 5, 6}));
  ring.resize(2);
  EXPECT_EQ(all(ring), (std::vector<int>{5, 6}));
  EXPECT_EQ(ring.overwritten(), 4u);
  ring.resize(3);
  ring.push(7);
  EXPECT_EQ(all(ring), (std::vector<int>{5, 6, 7}));
  ring.push(8);
  EXPECT_EQ(all(ring), (std::vector<int>{6, 7, 8}));
  EXPECT_EQ(ring.overwritten(), 5u);
}

TEST(RingBuffer, IsOffBeforeResetAndAfterResetToZero) {
  RingBuffer<int> ring;
  EXPECT_EQ(ring.capacity(), 0u);
  ring.reset(2);
  ring.push(1);
  ring.reset(0);
  EXPECT_EQ(ring.capacity(), 0u);
  EXPECT_EQ(ring.size(), 0u);
}

}  // namespace
}  // namespace gpumemx
