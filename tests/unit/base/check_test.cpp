// SPDX-License-Identifier: BSD-3-Clause
#include "base/check.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(CheckDeathTest, SaysWhichRuleWhichConditionAndWhere) {
  const int two = 2;
  EXPECT_DEATH(GPUMEMX_CHECK(two == 3, "two is not three"),
               "gpumemx: two is not three .two == 3 failed at .*check_test.cpp:");
}

TEST(Check, EvaluatesItsConditionOnce) {
  int times = 0;
  GPUMEMX_CHECK(++times == 1, "once");
  EXPECT_EQ(times, 1);
}

}  // namespace
}  // namespace gpumemx
