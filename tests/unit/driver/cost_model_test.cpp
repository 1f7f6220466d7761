// SPDX-License-Identifier: BSD-3-Clause
//
// The cost model against the table that it was taken from.
#include "driver/cost_model.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(CostModel, TurnsMicrosecondsAGibIntoMicrosecondsAHandle) {
  const CostModel costs;
  EXPECT_NEAR(costs.microseconds(DriverCall::kCreate, 2_MiB), 5789.0 / 512, 1e-9);
  EXPECT_NEAR(costs.microseconds(DriverCall::kCreate, 512_MiB), 67.0 / 2, 1e-9);
  EXPECT_NEAR(costs.microseconds(DriverCall::kRelease, 64_MiB), 821.0 / 16, 1e-9);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kUnmap, 2_MiB), 20.6);
}

TEST(CostModel, SplitsMapAndAccessByTheirColumnsAndKeepsTheirSum) {
  const CostModel costs;
  const double map = costs.microseconds(DriverCall::kMap, 2_MiB);
  const double access = costs.microseconds(DriverCall::kSetAccess, 2_MiB);
  EXPECT_NEAR(map + access, 31.9, 1e-9);
  EXPECT_NEAR(access / map, 15745.0 / 580, 1e-9);
}

TEST(CostModel, InterpolatesBetweenTheMeasuredSizesAndIsFlatOutside) {
  const CostModel costs;
  const double at_64 = costs.microseconds(DriverCall::kUnmap, 64_MiB);
  const double at_128 = costs.microseconds(DriverCall::kUnmap, 128_MiB);
  EXPECT_NEAR(costs.microseconds(DriverCall::kUnmap, 96_MiB), (at_64 + at_128) / 2, 1e-9);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kUnmap, 1_MiB),
                   costs.microseconds(DriverCall::kUnmap, 2_MiB));
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kUnmap, 4_GiB),
                   costs.microseconds(DriverCall::kUnmap, 512_MiB));
}

TEST(CostModel, ChargesCallsWithoutAHandleOneFigure) {
  const CostModel costs;
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kAllocate, 1_GiB), 190);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kRecord), 0.27);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kQuery), 1.6);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kMemory), 5.4);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kExport), 1150);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kImport), 35);
  EXPECT_DOUBLE_EQ(costs.microseconds(DriverCall::kCopy, 100_MiB), 10 + 53);
}

}  // namespace
}  // namespace gpumemx
