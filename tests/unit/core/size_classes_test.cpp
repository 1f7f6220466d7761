// SPDX-License-Identifier: BSD-3-Clause
#include "core/size_classes.hpp"

#include <gtest/gtest.h>

#include "core/options.hpp"

namespace gpumemx {
namespace {

TEST(BlockSize, IsWholeGranulesAndAtLeastOne) {
  EXPECT_EQ(block_size(0_B), 512_B);
  EXPECT_EQ(block_size(1_B), 512_B);
  EXPECT_EQ(block_size(512_B), 512_B);
  EXPECT_EQ(block_size(513_B), 1024_B);
  EXPECT_EQ(block_size(kMaxRequest), kMaxRequest);
}

TEST(Bins, AreExactBelow32Granules) {
  for (std::uint32_t n = 0; n < 32; ++n) EXPECT_EQ(bin_of(kGranule * n), n);
}

TEST(Bins, AreMonotoneFromTheSmallestToTheLargestSize) {
  std::uint32_t last = 0;
  for (std::uint64_t granules = 1; granules < 1ull << 51; granules += 1 + granules / 97) {
    const std::uint32_t bin = bin_of(kGranule * granules);
    ASSERT_GE(bin, last) << granules;
    ASSERT_LE(bin, last + 1) << granules;  // no bin is skipped by steps narrower than a bin
    ASSERT_LT(bin, kBins);
    last = bin;
  }
}

TEST(Bins, HoldSizesThatDifferByAtMostOne32nd) {
  std::uint64_t first = 32;  // granules: the smallest size of the bin
  for (int octave = 0; octave < 20; ++octave) {
    for (int part = 0; part < 32; ++part) {
      const std::uint64_t width = 1ull << octave;
      ASSERT_EQ(bin_of(kGranule * first), bin_of(kGranule * (first + width - 1))) << first;
      ASSERT_EQ(bin_of(kGranule * first) + 1, bin_of(kGranule * (first + width))) << first;
      ASSERT_LE(width * 32, first);
      first += width;
    }
  }
}

TEST(Bins, CoverTheLargestSizeThatABlockCanHave) {
  EXPECT_LT(bin_of({~0ull / kGranule.n * kGranule.n}), kBins);
}

TEST(HeapKind, DependsOnTheSizeAndOnWholePages) {
  const Options options;
  EXPECT_EQ(heap_kind(512_B, false, options), HeapKind::kSmall);
  EXPECT_EQ(heap_kind(1_MiB, false, options), HeapKind::kSmall);
  EXPECT_EQ(heap_kind(1_MiB + 512_B, false, options), HeapKind::kRest);
  EXPECT_EQ(heap_kind(2_MiB, false, options), HeapKind::kPages);
  EXPECT_EQ(heap_kind(3_MiB, false, options), HeapKind::kRest);
  EXPECT_EQ(heap_kind(32_MiB, false, options), HeapKind::kPages);
  EXPECT_EQ(heap_kind(33_MiB, false, options), HeapKind::kBig);
  EXPECT_EQ(heap_kind(33_MiB - 512_B, false, options), HeapKind::kBig);
  EXPECT_EQ(heap_kind(31_MiB, false, options), HeapKind::kRest);
}

TEST(HeapKind, OfPlainMemoryIsSmallOrLarge) {
  const Options options;
  EXPECT_EQ(heap_kind(1_MiB, true, options), HeapKind::kPlainSmall);
  EXPECT_EQ(heap_kind(2_MiB, true, options), HeapKind::kPlainLarge);
  EXPECT_EQ(heap_kind(40_MiB, true, options), HeapKind::kPlainLarge);
}

TEST(HeapKind, FollowsTheOptions) {
  Options options;
  options.small_limit = 64_KiB;
  options.big_from = 5_MiB;
  EXPECT_EQ(heap_kind(64_KiB, false, options), HeapKind::kSmall);
  EXPECT_EQ(heap_kind(65_KiB, false, options), HeapKind::kRest);
  EXPECT_EQ(heap_kind(5_MiB, false, options), HeapKind::kBig);
}

TEST(HeapKind, SaysWhatIsPlainSmallOrFillsPages) {
  const auto are = [](auto says) {
    std::vector<HeapKind> yes;
    for (int k = 0; k < kHeapKinds; ++k) {
      if (says(static_cast<HeapKind>(k))) yes.push_back(static_cast<HeapKind>(k));
    }
    return yes;
  };
  EXPECT_EQ(are(is_plain), (std::vector{HeapKind::kPlainSmall, HeapKind::kPlainLarge}));
  EXPECT_EQ(are(is_small), (std::vector{HeapKind::kSmall, HeapKind::kPlainSmall}));
  EXPECT_EQ(are(fills_pages), (std::vector{HeapKind::kPages, HeapKind::kBig}));
}

TEST(PlainSegmentSize, Is2MiBForSmallBlocks20MiBForMiddlingOnesAndPagesForOthers) {
  EXPECT_EQ(plain_segment_size(512_B, HeapKind::kPlainSmall), 2_MiB);
  EXPECT_EQ(plain_segment_size(1_MiB, HeapKind::kPlainSmall), 2_MiB);
  EXPECT_EQ(plain_segment_size(2_MiB, HeapKind::kPlainLarge), 20_MiB);
  EXPECT_EQ(plain_segment_size(10_MiB - 512_B, HeapKind::kPlainLarge), 20_MiB);
  EXPECT_EQ(plain_segment_size(10_MiB, HeapKind::kPlainLarge), 10_MiB);
  EXPECT_EQ(plain_segment_size(10_MiB + 512_B, HeapKind::kPlainLarge), 12_MiB);
}

TEST(Pow2PagesBelow, IsAtLeastOnePage) {
  EXPECT_EQ(pow2_pages_below(0_B), 2_MiB);
  EXPECT_EQ(pow2_pages_below(3_MiB), 2_MiB);
  EXPECT_EQ(pow2_pages_below(4_MiB), 4_MiB);
  EXPECT_EQ(pow2_pages_below(15_MiB), 8_MiB);
  EXPECT_EQ(pow2_pages_below(1_GiB + 1_B), 1_GiB);
}

}  // namespace
}  // namespace gpumemx
