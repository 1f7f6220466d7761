// SPDX-License-Identifier: BSD-3-Clause
#include "base/result.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(Result, HoldsAValueOrAnError) {
  const Result<int> good = 5;
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(good.value(), 5);
  const Result<int> bad = Error{Errc::kOutOfMemory, 2_MiB, "create"};
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.error().code, Errc::kOutOfMemory);
  EXPECT_EQ(bad.error().requested, 2_MiB);
  EXPECT_EQ(bad.error().where, "create");
}

TEST(Result, OkStatusIsOk) { EXPECT_TRUE(ok_status().ok()); }

TEST(Errc, EachCodeHasItsOwnText) {
  EXPECT_STREQ(to_string(Errc::kOutOfMemory), "out of memory");
  EXPECT_STREQ(to_string(Errc::kOutOfAddressSpace), "out of address space");
  EXPECT_STREQ(to_string(Errc::kUnsupported), "unsupported");
  EXPECT_STREQ(to_string(Errc::kCaptureActive), "the stream is capturing");
  EXPECT_STREQ(to_string(Errc::kShuttingDown), "the driver is shutting down");
  EXPECT_STREQ(to_string(Errc::kInvalidArgument), "invalid argument");
  EXPECT_STREQ(to_string(Errc::kDriverFailure), "driver failure");
  EXPECT_STREQ(to_string(Errc{99}), "unknown");
}

}  // namespace
}  // namespace gpumemx
