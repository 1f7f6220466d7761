// SPDX-License-Identifier: BSD-3-Clause
//
// The words of a verdict. That each cause is found, with figures that add up: miss_test.cpp.
#include "core/oom.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

OomVerdict verdict(OomCause cause) {
  OomVerdict v;
  v.cause = cause;
  v.requested = 3_GiB;
  v.block = 3_GiB;
  v.device_known = true;
  v.device_total = 16_GiB;
  v.device_free = 1_GiB;
  v.others = 2_GiB;
  v.cap = 14_GiB;
  v.reserved = 13_GiB;
  v.live = 6_GiB;
  v.pending = 512_MiB;
  v.held = 3_GiB;
  v.idle_pending = 512_MiB;
  v.idle_private = 1_GiB;
  v.idle = 2_GiB;
  v.in_private_pools = 5_GiB;
  v.largest_free = 1536_MiB;
  return v;
}

constexpr const char* kFigures =
    " Device 16.00 GiB: 13.00 GiB reserved here, 2.00 GiB by others, 1.00 GiB free. Reserved "
    "13.00 GiB: 6.00 GiB live, 512.00 MiB pending, 3.00 GiB held, 3.50 GiB idle (512.00 MiB of it "
    "not yet complete, 1.00 GiB in private pools).";

TEST(OomVerdict, SaysTheSizeTheCauseAndTheFigures) {
  const struct {
    OomCause cause;
    const char* sentence;
  } rows[] = {
      {OomCause::kFull, "The memory in use fills the device; only freeing helps."},
      {OomCause::kFragmented,
       "3.00 GiB is free on handles that something in use shares; the largest free block is "
       "1.50 GiB."},
      {OomCause::kCapped,
       "The cap of 14.00 GiB for this process is reached; the device has 1.00 GiB free."},
      {OomCause::kOtherUsers, "Others hold 2.00 GiB of the device."},
      {OomCause::kPendingOnStreams, "1.00 GiB was freed but is still used by streams."},
      {OomCause::kHeldByPools, "Private pools hold 5.00 GiB."},
      {OomCause::kNonsenseSize,
       "That is more than the device has; the size was probably computed wrongly."},
      {OomCause::kDuringCapture,
       "Memory could be had by waiting or freeing, which a capture under way does not allow."},
      {OomCause::kDriverRefused, "The driver refused although 1.00 GiB is free."},
      {OomCause::kShuttingDown, "The driver is shutting down."},
  };
  for (const auto& [cause, sentence] : rows) {
    EXPECT_EQ(verdict(cause).text(),
              std::string("Tried to allocate 3.00 GiB. ") + sentence + kFigures);
  }
  EXPECT_EQ(verdict(OomCause{99}).text(), std::string("Tried to allocate 3.00 GiB. ") + kFigures);
}

TEST(OomVerdict, LeavesOutTheDeviceWhenItCouldNotBeAsked) {
  OomVerdict v = verdict(OomCause::kFull);
  v.device_known = false;
  EXPECT_EQ(v.text().find("Device"), std::string::npos);
}

TEST(OomVerdict, EndsWithWhatTheDriverSaid) {
  OomVerdict v = verdict(OomCause::kDriverRefused);
  v.driver_said = "create: out of memory";
  EXPECT_TRUE(v.text().ends_with(" The driver said: create: out of memory."));
}

TEST(OomCause, EachHasItsName) {
  EXPECT_STREQ(to_string(OomCause::kFull), "full");
  EXPECT_STREQ(to_string(OomCause::kFragmented), "fragmented");
  EXPECT_STREQ(to_string(OomCause::kCapped), "capped");
  EXPECT_STREQ(to_string(OomCause::kOtherUsers), "other users");
  EXPECT_STREQ(to_string(OomCause::kPendingOnStreams), "pending on streams");
  EXPECT_STREQ(to_string(OomCause::kHeldByPools), "held by pools");
  EXPECT_STREQ(to_string(OomCause::kNonsenseSize), "nonsense size");
  EXPECT_STREQ(to_string(OomCause::kDuringCapture), "during a capture");
  EXPECT_STREQ(to_string(OomCause::kDriverRefused), "refused by the driver");
  EXPECT_STREQ(to_string(OomCause::kShuttingDown), "shutting down");
  EXPECT_STREQ(to_string(OomCause{99}), "unknown");
}

}  // namespace
}  // namespace gpumemx
