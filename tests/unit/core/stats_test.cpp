// SPDX-License-Identifier: BSD-3-Clause
#include "core/stats.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(Stat, KeepsCurrentPeakAndSums) {
  Stat s;
  s.add(5);
  s.add(7);
  s.sub(9);
  s.add(2);
  EXPECT_EQ(s.current, 5);
  EXPECT_EQ(s.peak, 12);
  EXPECT_EQ(s.allocated, 14);
  EXPECT_EQ(s.freed(), 9);
}

TEST(StatArray, CountsApartWhatIsSmall) {
  StatArray a;
  a.add(true, 3);
  a.add(false, 100);
  a.sub(true, 1);
  EXPECT_EQ(a.all().current, 102);
  EXPECT_EQ(a.part[StatArray::kSmall].current, 2);
  EXPECT_EQ(a.part[StatArray::kLarge].current, 100);
  EXPECT_EQ(a.all().peak, 103);
  EXPECT_EQ(a.all().freed(), 1);
}

TEST(StatArray, ReclassMovesBetweenThePartsAndLeavesAllAlone) {
  StatArray a;
  a.add(true, 8);
  a.reclass(false, 8);
  EXPECT_EQ(a.all().current, 8);
  EXPECT_EQ(a.all().allocated, 8);
  EXPECT_EQ(a.part[StatArray::kSmall].current, 0);
  EXPECT_EQ(a.part[StatArray::kLarge].current, 8);
  a.reclass(true, 8);
  EXPECT_EQ(a.part[StatArray::kSmall].current, 8);
  EXPECT_EQ(a.part[StatArray::kLarge].current, 0);
}

TEST(Stats, VisitsEachOfTheNineArraysOnce) {
  Stats s;
  int visits = 0;
  s.for_each_array([&](StatArray& a) {
    ++visits;
    a.add(true, 1);
  });
  EXPECT_EQ(visits, 9);
  for (const StatArray* a :
       {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes,
        &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes}) {
    EXPECT_EQ(a->all().current, 1);
  }
}

TEST(Stats, ResetPeaksLowersPeaksToWhatIsCurrent) {
  Stats s;
  s.segment.add(false, 10);
  s.segment.sub(false, 6);
  s.num_ooms = 3;
  s.reset_peaks();
  EXPECT_EQ(s.segment.all().peak, 4);
  EXPECT_EQ(s.segment.part[StatArray::kLarge].peak, 4);
  EXPECT_EQ(s.segment.all().allocated, 10);
  EXPECT_EQ(s.num_ooms, 3u);
}

TEST(Stats, ResetAccumulatedClearsSumsAndCountersAndKeepsTheRest) {
  Stats s;
  s.segment.add(false, 10);
  s.segment.sub(false, 6);
  s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 3;
  s.paths.hits = 8;
  s.reset_accumulated();
  EXPECT_EQ(s.segment.all().allocated, 0);
  EXPECT_EQ(s.segment.all().freed(), 0);
  EXPECT_EQ(s.segment.all().current, 4);
  EXPECT_EQ(s.segment.all().peak, 10);
  EXPECT_EQ(s.num_alloc_retries + s.num_ooms + s.num_device_alloc + s.num_device_free, 0u);
  EXPECT_EQ(s.paths.hits, 8u);
}

}  // namespace
}  // namespace gpumemx
