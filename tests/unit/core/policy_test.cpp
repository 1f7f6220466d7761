// SPDX-License-Identifier: BSD-3-Clause
#include "core/policy.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

constexpr std::uint64_t kEndless = 1ull << 20;

class PolicyTest : public ::testing::Test {
 protected:
  Policy roomy() const { return {options_, 10_GiB, 8_GiB, 100_GiB}; }
  Policy tight() const { return {options_, 80_GiB, 8_GiB, 100_GiB}; }
  Options options_;
};

TEST_F(PolicyTest, IsTightFromTheGivenShareOfTheCapacity) {
  EXPECT_FALSE((Policy{options_, {70_GiB - 1_B}, {}, 100_GiB}.tight()));
  EXPECT_TRUE((Policy{options_, {70_GiB}, {}, 100_GiB}.tight()));
  EXPECT_TRUE(tight().tight());
}

TEST_F(PolicyTest, TheBudgetIsThePeakAndTheSlackButNeverAboveTheCapacity) {
  EXPECT_EQ(roomy().budget(), 8_GiB);
  options_.slack = 0.5;
  EXPECT_EQ(roomy().budget(), 12_GiB);
  EXPECT_EQ((Policy{options_, {}, 80_GiB, 100_GiB}.budget()), 100_GiB);
}

TEST_F(PolicyTest, SmallProgramsHaveACushionThatFadesOut) {
  const auto budget = [&](Bytes peak) { return Policy{options_, peak, peak, 100_GiB}.budget(); };
  options_.cushion = 0.25;
  options_.cushion_until = 6_GiB;
  EXPECT_EQ(budget(2_GiB), 2_GiB + 512_MiB);
  EXPECT_EQ(budget(4_GiB), 4_GiB + 512_MiB);  // a quarter of what is left to 6 GiB
  EXPECT_EQ(budget(5_GiB), 5_GiB + 256_MiB);
  EXPECT_EQ(budget(6_GiB), 6_GiB);
  EXPECT_EQ(budget(50_GiB), 50_GiB);
  EXPECT_EQ((Policy{options_, 3_GiB, 3_GiB, 24_GiB}.budget()), 3_GiB);  // it could fill that
  EXPECT_EQ((Policy{options_, 3_GiB, 3_GiB, 24_GiB + 4_B}.budget()), 3_GiB + 768_MiB);
  options_.slack = 0.5;
  EXPECT_EQ(budget(2_GiB), 3_GiB + 512_MiB);
}

TEST_F(PolicyTest, AHitMayWasteWhatCouldBeGrownForNothing) {
  options_.cushion = 0.25;
  options_.cushion_until = 6_GiB;
  EXPECT_EQ((Policy{options_, 2_GiB, 2_GiB, 100_GiB}.hit_waste()), 512_MiB);
  EXPECT_EQ((Policy{options_, 2_GiB + 500_MiB, 2_GiB, 100_GiB}.hit_waste()), 12_MiB);
  EXPECT_EQ((Policy{options_, 3_GiB, 2_GiB, 100_GiB}.hit_waste()), 4_MiB);  // twice the usual
  // A program that has not grown yet may not waste what it will need, but for one handle.
  EXPECT_EQ((Policy{options_, 1_GiB, 8_GiB, 100_GiB}.hit_waste()), 8_MiB);
}

TEST_F(PolicyTest, ALoneBlockMayWasteTheRestOfItsHandle) {
  const auto waste = [&](Bytes reserved) {
    return Policy{options_, reserved, 8_GiB, 100_GiB}.hit_waste();
  };
  EXPECT_EQ(waste(8_GiB + 8_MiB), 8_MiB);
  EXPECT_EQ(waste(8_GiB + 11_MiB), 5_MiB);
  EXPECT_EQ(waste(8_GiB + 15_MiB), 2_MiB);
}

TEST_F(PolicyTest, UnmappingInLineIsDearWhereMemoryIsToSpareForIt) {
  EXPECT_EQ((Policy{options_, 2_GiB, 2_GiB, 100_GiB}.repoint_cost()), kBusyRepointCost);
  EXPECT_EQ((Policy{options_, 8_GiB, 8_GiB, 100_GiB}.repoint_cost()), kRepointCost);
  EXPECT_EQ((Policy{options_, 2_GiB, 2_GiB, 100_GiB, /*has_settled=*/false}.repoint_cost()),
            kRepointCost);
  EXPECT_EQ((Policy{options_, 80_GiB, 2_GiB, 100_GiB}.repoint_cost()), kRepointCost);  // tight
}

TEST_F(PolicyTest, MemoryIsWorthMoreThanDriverTimeWhenItIsTight) {
  EXPECT_EQ(roomy().price(HeapKind::kRest), 24);
  EXPECT_EQ(roomy().price(HeapKind::kSmall), 24);
  EXPECT_EQ(roomy().price(HeapKind::kPages), 4);
  EXPECT_EQ(roomy().price(HeapKind::kBig), 4);
  EXPECT_EQ(tight().price(HeapKind::kRest), 0.65);
  EXPECT_EQ(tight().price(HeapKind::kBig), 0.65);
  options_.tight_price = 9;  // never dearer than when it is not tight
  EXPECT_EQ(tight().price(HeapKind::kBig), 4);
}

TEST_F(PolicyTest, ADriverCallIsWorthMoreWasteWhileMuchIsIdle) {
  const auto price = [&](Bytes idle, HeapKind kind) {
    Policy policy = roomy();
    policy.peak_live = 10_GiB;
    policy.idle = idle;
    return policy.price(kind);
  };
  EXPECT_EQ(price(2_GiB, HeapKind::kPages), 4);  // a fifth of the peak
  EXPECT_DOUBLE_EQ(price(2_GiB + 512_MiB, HeapKind::kPages), 6);
  EXPECT_EQ(price(9_GiB, HeapKind::kPages), 8);
  EXPECT_EQ(price(9_GiB, HeapKind::kBig), 8);
  EXPECT_EQ(price(9_GiB, HeapKind::kRest), 24);
  Policy near_the_end = tight();
  near_the_end.idle = 8_GiB;
  EXPECT_EQ(near_the_end.price(HeapKind::kPages), 0.65);
  Policy fresh{options_, {}, {}, 100_GiB};
  EXPECT_EQ(fresh.price(HeapKind::kPages), 4);
}

TEST_F(PolicyTest, AHitMayWasteMoreInALargeProgram) {
  const auto waste = [&](Bytes live) {
    return Policy{options_, live + 1_GiB, live, 1000_GiB}.hit_waste();
  };
  EXPECT_EQ(waste(12_GiB), 2_MiB);
  EXPECT_EQ(waste(18_GiB), 3_MiB);  // a 6144th
  EXPECT_EQ(waste(80_GiB), 4_MiB);  // at most twice the setting
}

TEST_F(PolicyTest, TheLongerASearchTheMoreAReadyPlaceMayWaste) {
  EXPECT_EQ(roomy().switch_waste(0), 1_MiB);
  EXPECT_EQ(roomy().switch_waste(5), 2_MiB);
  EXPECT_EQ(roomy().switch_waste(30), 7_MiB);
  EXPECT_EQ(tight().switch_waste(0), 512_KiB);
  EXPECT_EQ((Policy{options_, 99_GiB, 90_GiB, 100_GiB}.switch_waste(30)), 0_B);  // all are weighed
}

TEST_F(PolicyTest, WhatWaitsToBeReleasedIsLittle) {
  EXPECT_EQ((Policy{options_, 2_GiB, 1_GiB, 100_GiB}.doomed_at_most()), 24_MiB);
  EXPECT_EQ((Policy{options_, 60_GiB, 50_GiB, 100_GiB}.doomed_at_most()), 100_MiB);
}

TEST_F(PolicyTest, AHitMayWasteLessWhenItIsTight) {
  EXPECT_EQ(roomy().hit_waste(), 2_MiB);
  EXPECT_EQ(tight().hit_waste(), 1_MiB);
  options_.hit_waste = 512_KiB;
  EXPECT_EQ(tight().hit_waste(), 512_KiB);
}

TEST_F(PolicyTest, SmallHeapsTakeSmallHandles) {
  EXPECT_EQ(roomy().handle_pages(HeapKind::kSmall, kEndless, 1_MiB), 1u);
  options_.small_handle = 8_MiB;
  EXPECT_EQ(roomy().handle_pages(HeapKind::kSmall, 1, 1_MiB), 4u);
}

TEST_F(PolicyTest, AHandleIsAQuarterOfTheBlockWithinItsHeapsBounds) {
  EXPECT_EQ(roomy().handle_pages(HeapKind::kRest, kEndless, 3_MiB), 4u);    // at least 8 MiB
  EXPECT_EQ(roomy().handle_pages(HeapKind::kRest, kEndless, 70_MiB), 8u);   // 17.5 -> 16 MiB
  EXPECT_EQ(roomy().handle_pages(HeapKind::kRest, kEndless, 1_GiB), 16u);   // at most 32 MiB
  EXPECT_EQ(roomy().handle_pages(HeapKind::kPages, kEndless, 16_MiB), 4u);  // at least 8 MiB
  EXPECT_EQ(roomy().handle_pages(HeapKind::kBig, kEndless, 130_MiB), 16u);  // 32.5 -> 32 MiB
  EXPECT_EQ(roomy().handle_pages(HeapKind::kPages, kEndless, 2_GiB), 32u);  // at most 64 MiB
}

TEST_F(PolicyTest, PageBlocksNeedNoPowersOfTwo) {
  EXPECT_EQ(roomy().handle_pages(HeapKind::kPages, kEndless, 98_MiB), 12u);  // 24.5 -> 24 MiB
  EXPECT_EQ(roomy().handle_pages(HeapKind::kBig, kEndless, 98_MiB), 8u);     // 24.5 -> 16 MiB
}

TEST_F(PolicyTest, OnlyHandlesOfPageBlocksAreCutToTheGap) {
  EXPECT_EQ(roomy().handle_pages(HeapKind::kPages, 3, 16_MiB), 3u);
  EXPECT_EQ(roomy().handle_pages(HeapKind::kPages, 0, 16_MiB), 1u);
  EXPECT_EQ(roomy().handle_pages(HeapKind::kBig, 1, 33_MiB), 4u);
  EXPECT_EQ(roomy().handle_pages(HeapKind::kRest, 1, 3_MiB), 4u);
}

TEST_F(PolicyTest, AHandleIsAtMostAThousandthOfTheCapacity) {
  const auto pages = [&](HeapKind kind, Bytes capacity) {
    return Policy{options_, 1_GiB, 1_GiB, capacity}.handle_pages(kind, kEndless, 1_GiB);
  };
  EXPECT_EQ(pages(HeapKind::kBig, 64_GiB), 32u);
  EXPECT_EQ(pages(HeapKind::kBig, 64_GiB - 1_B), 16u);
  EXPECT_EQ(pages(HeapKind::kPages, 24_GiB), 8u);
  EXPECT_EQ(pages(HeapKind::kRest, 24_GiB), 8u);
  EXPECT_EQ(pages(HeapKind::kRest, 4_GiB), 4u);  // not below the least of the heap
  EXPECT_EQ(pages(HeapKind::kBig, 4_GiB), 4u);
}

TEST_F(PolicyTest, PageBlocksInAStreakShareHandles) {
  const auto pages = [&](Bytes streak, Bytes block) {
    Policy policy = roomy();
    policy.streak = streak;
    return policy.handle_pages(HeapKind::kPages, block.n / kPage.n, block);
  };
  EXPECT_EQ(pages(0_B, 8_MiB), 4u);
  EXPECT_EQ(pages(256_MiB - 2_MiB, 8_MiB), 4u);  // a 16th of 128 MiB is no more than the usual
  EXPECT_EQ(pages(256_MiB, 8_MiB), 8u);
  EXPECT_EQ(pages(512_MiB, 8_MiB), 16u);
  EXPECT_EQ(pages(64_GiB, 8_MiB), 16u);   // at most 32 MiB
  EXPECT_EQ(pages(64_GiB, 2_MiB), 4u);    // at most four blocks
  EXPECT_EQ(pages(64_GiB, 32_MiB), 16u);  // up to here blocks count as many small ones
  EXPECT_EQ(pages(64_GiB, 34_MiB), 4u);

  Policy other = roomy();
  other.streak = 64_GiB;
  EXPECT_EQ(other.handle_pages(HeapKind::kRest, 1, 8_MiB), 4u);
  other.capacity = 16_GiB;
  other.reserved = 1_GiB;
  EXPECT_EQ(other.handle_pages(HeapKind::kPages, 4, 8_MiB), 8u);  // at most a 1,024th of that
  other.reserved = 15_GiB;
  EXPECT_EQ(other.handle_pages(HeapKind::kPages, 4, 8_MiB), 2u);  // tight
}

TEST_F(PolicyTest, BeyondTheBudgetAHandleMayBeAheadOfItsGapALittle) {
  EXPECT_EQ(roomy().ahead_pages(HeapKind::kRest), 3u);
  EXPECT_EQ(roomy().ahead_pages(HeapKind::kBig), 3u);
  EXPECT_EQ(roomy().ahead_pages(HeapKind::kPages), 15u);
  EXPECT_EQ(tight().ahead_pages(HeapKind::kRest), 0u);
  EXPECT_EQ(tight().ahead_pages(HeapKind::kPages), 0u);
}

TEST_F(PolicyTest, HandlesAreSmallWhenMemoryIsTight) {
  EXPECT_EQ(tight().handle_pages(HeapKind::kRest, kEndless, 1_GiB), 2u);
  EXPECT_EQ(tight().handle_pages(HeapKind::kPages, kEndless, 1_GiB), 2u);
  EXPECT_EQ(tight().handle_pages(HeapKind::kSmall, kEndless, 1_MiB), 1u);
}

}  // namespace
}  // namespace gpumemx
