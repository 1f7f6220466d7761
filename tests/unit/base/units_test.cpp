// SPDX-License-Identifier: BSD-3-Clause
//
// Sizes, addresses and ranges: the arithmetic that everything else trusts.
#include "base/units.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(Bytes, LiteralsArePowersOf1024) {
  EXPECT_EQ((7_B).n, 7u);
  EXPECT_EQ((1_KiB).n, 1024u);
  EXPECT_EQ((3_MiB).n, 3145728u);
  EXPECT_EQ((1_GiB).n, 1073741824u);
  EXPECT_EQ((1_TiB).n, 1099511627776u);
}

TEST(Bytes, AddSubtractMultiplyAndCompare) {
  Bytes size = 3_KiB;
  size += 1_KiB;
  EXPECT_EQ(size, 4_KiB);
  size -= 512_B;
  EXPECT_EQ(size.n, 3584u);
  EXPECT_EQ((size * 2).n, 7168u);
  EXPECT_LT(3_KiB, 4_KiB);
  EXPECT_EQ(4_KiB - 1_KiB + 2_KiB, 5_KiB);
}

TEST(Bytes, RoundUpKeepsMultiplesAndGoesToTheNextOneElse) {
  EXPECT_EQ(round_up(0_B, 512_B), 0_B);
  EXPECT_EQ(round_up(1_B, 512_B), 512_B);
  EXPECT_EQ(round_up(512_B, 512_B), 512_B);
  EXPECT_EQ(round_up(513_B, 512_B), 1024_B);
}

TEST(Bytes, RoundDownKeepsMultiplesAndGoesToTheOneBeforeElse) {
  EXPECT_EQ(round_down(511_B, 512_B), 0_B);
  EXPECT_EQ(round_down(512_B, 512_B), 512_B);
  EXPECT_EQ(round_down(1023_B, 512_B), 512_B);
}

TEST(DeviceAddr, MovesByBytesAndTheirDifferenceIsBytes) {
  const DeviceAddr a{4096};
  EXPECT_EQ((a + 1_KiB).n, 5120u);
  EXPECT_EQ((a - 1_KiB).n, 3072u);
  EXPECT_EQ((a + 3_KiB) - a, 3_KiB);
  EXPECT_LT(a, a + 1_B);
}

TEST(AddrRange, ContainsItsFirstByteAndNotItsEnd) {
  const AddrRange r{{1000}, {24}};
  EXPECT_EQ(r.end().n, 1024u);
  EXPECT_FALSE(r.contains({999}));
  EXPECT_TRUE(r.contains({1000}));
  EXPECT_TRUE(r.contains({1023}));
  EXPECT_FALSE(r.contains({1024}));
}

TEST(AddrRange, OverlapsOnlyWhenAByteIsShared) {
  const AddrRange r{{1000}, {24}};
  EXPECT_TRUE(r.overlaps({{1023}, {10}}));
  EXPECT_TRUE(r.overlaps({{990}, {11}}));
  EXPECT_TRUE(r.overlaps({{1004}, {1}}));
  EXPECT_FALSE(r.overlaps({{1024}, {10}}));
  EXPECT_FALSE(r.overlaps({{990}, {10}}));
}

TEST(StreamRef, IsTheSameByIdAndNotByTheDriversValue) {
  const StreamRef first{StreamId{3}, 77};
  EXPECT_EQ(first, (StreamRef{StreamId{3}, 78}));
  EXPECT_FALSE((first == StreamRef{StreamId{4}, 77}));
}

}  // namespace
}  // namespace gpumemx
