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
