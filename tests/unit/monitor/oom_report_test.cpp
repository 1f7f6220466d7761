// SPDX-License-Identifier: BSD-3-Clause
#include "monitor/oom_report.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

// 8 GiB of device: 6 reserved, 1 elsewhere, 1 free.
OomReport report(OomCause cause, Bytes block = 512_MiB) {
  OomReport r;
  r.id = "7-1";
  r.verdict.cause = cause;
  r.verdict.requested = r.verdict.block = block;
  r.verdict.device_known = true;
  r.verdict.device_total = 8_GiB;
  r.verdict.device_free = 1_GiB;
  r.verdict.others = 1_GiB;
  r.verdict.reserved = 6_GiB;
  r.verdict.live = 6_GiB;
  r.verdict.cap = {~0ull};
  return r;
}

constexpr OomCause kAll[] = {
    OomCause::kFull,         OomCause::kFragmented,       OomCause::kCapped,
    OomCause::kOtherUsers,   OomCause::kPendingOnStreams, OomCause::kHeldByPools,
    OomCause::kNonsenseSize, OomCause::kDuringCapture,    OomCause::kDriverRefused,
    OomCause::kShuttingDown,
};

TEST(OomReport, AdvisesNothingWhereNothingIsKnownToHelp) {
  for (const bool plain : {false, true}) {
    for (const OomCause cause : {OomCause::kFull, OomCause::kNonsenseSize, OomCause::kDriverRefused,
                                 OomCause::kShuttingDown}) {
      OomReport r = report(cause);
      r.is_plain = plain;
      EXPECT_EQ(r.advice(), "") << to_string(cause);
    }
  }
}

TEST(OomReport, NeverProposesWhatIsInForce) {
  for (const OomCause cause : kAll) {
    OomReport r = report(cause);
    EXPECT_EQ(r.advice().find("mode:virtual"), std::string::npos) << to_string(cause);
    r.is_plain = true;
    EXPECT_EQ(r.advice().find("mode:virtual") == std::string::npos, cause != OomCause::kFragmented);
  }
}

TEST(OomReport, ProposesACapOnlyWhereTheDeviceHasRoomForIt) {
  OomReport r = report(OomCause::kCapped);
  r.verdict.cap = 6_GiB;
  EXPECT_EQ(r.advice(), "A cap of 6.50 GiB would have let it pass.");
  r.verdict.block = 1_GiB;
  EXPECT_EQ(r.advice(), "A cap of 7.00 GiB would have let it pass.");
  r.verdict.block = 1_GiB + 512_B;
  EXPECT_EQ(r.advice(), "");
  r.verdict.block = 512_MiB;
  r.verdict.device_known = false;
  EXPECT_EQ(r.advice(), "");
}

TEST(OomReport, GivesOneSentenceForEachOtherCause) {
  for (const OomCause cause : {OomCause::kOtherUsers, OomCause::kPendingOnStreams,
                               OomCause::kHeldByPools, OomCause::kDuringCapture}) {
    const std::string advice = report(cause).advice();
    EXPECT_TRUE(advice.ends_with(".")) << advice;
    EXPECT_EQ(report(cause).text().find(advice) != std::string::npos, true) << advice;
  }
}

TEST(OomReport, TextNamesTheCauseTheCapsSourceTheHoldersAndTheNumber) {
  OomReport r = report(OomCause::kCapped);
  r.verdict.cap = 6_GiB;
  r.cap_source = "cap:6GiB in GPUMEMX_CONF";
  r.holders = {{"train.py:3 step", 2_GiB, 1}, {"model.py:9 forward", 1_GiB, 12}};
  EXPECT_EQ(r.text(),
            "Cause: capped. " + r.verdict.text() +
                " The cap was set by cap:6GiB in GPUMEMX_CONF. Most is held by train.py:3 step "
                "(2.00 GiB in 1 block), model.py:9 forward (1.00 GiB in 12 blocks). A cap of 6.50 "
                "GiB would have let it pass. (report 7-1)");
  r.verdict.cause = OomCause::kFull;
  EXPECT_EQ(r.text().find("was set by"), std::string::npos);
  r.id = "";
  EXPECT_EQ(r.text().find("(report"), std::string::npos);
}

}  // namespace
}  // namespace gpumemx
