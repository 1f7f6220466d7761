// SPDX-License-Identifier: BSD-3-Clause
#include "core/options.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

// What validate() says about the defaults after one change.
template <class Change>
std::string said_after(Change change) {
  Options options;
  change(options);
  return options.validate().value_or("");
}

TEST(Options, TheDefaultsAreInRange) { EXPECT_EQ(Options{}.validate(), std::nullopt); }

TEST(Options, EachHandleSizeIsAPowerOfTwoFrom2To64MiB) {
  const struct {
    const char* name;
    Bytes Options::* knob;
  } knobs[] = {
      {"small_handle", &Options::small_handle},       {"rest_handle", &Options::rest_handle},
      {"rest_handle_max", &Options::rest_handle_max}, {"big_handle", &Options::big_handle},
      {"big_handle_max", &Options::big_handle_max},   {"tight_handle", &Options::tight_handle}};
  for (const auto& [name, knob] : knobs) {
    for (const Bytes wrong : {0_B, 1_MiB, 6_MiB, 128_MiB}) {
      EXPECT_EQ(said_after([&](Options& o) { o.*knob = wrong; }),
                std::string(name) + " must be a power of two from 2 MiB to 64 MiB");
    }
  }
}

TEST(Options, TheLargestHandleIsNotBelowTheLeast) {
  EXPECT_EQ(said_after([](Options& o) { o.rest_handle_max = 4_MiB; }),
            "rest_handle_max must be at least rest_handle");
  EXPECT_EQ(said_after([](Options& o) { o.big_handle_max = 4_MiB; }),
            "big_handle_max must be at least big_handle");
}

TEST(Options, EveryOtherRangeIsNamedToo) {
  const std::string small = "small_limit must be from 512 B to 2 MiB";
  EXPECT_EQ(said_after([](Options& o) { o.small_limit = 511_B; }), small);
  EXPECT_EQ(said_after([](Options& o) { o.small_limit = 3_MiB; }), small);
  EXPECT_EQ(said_after([](Options& o) { o.hit_scan = 0; }), "hit_scan must be 1 or more");
  const std::string looks = "miss_runs and miss_extents must not be negative";
  EXPECT_EQ(said_after([](Options& o) { o.miss_runs = -1; }), looks);
  EXPECT_EQ(said_after([](Options& o) { o.miss_extents = -1; }), looks);
  EXPECT_EQ(said_after([](Options& o) { o.miss_tries = 0; }), "miss_tries must be 1 or more");
  EXPECT_EQ(said_after([](Options& o) { o.max_aliases = 0; }), "max_aliases must be 1 or more");
  const std::string prices = "prices must not be negative";
  EXPECT_EQ(said_after([](Options& o) { o.price = -1; }), prices);
  EXPECT_EQ(said_after([](Options& o) { o.price_pages = -1; }), prices);
  EXPECT_EQ(said_after([](Options& o) { o.tight_price = -1; }), prices);
  EXPECT_EQ(said_after([](Options& o) { o.slack = -0.1; }), "slack must be from 0 to 1");
  EXPECT_EQ(said_after([](Options& o) { o.slack = 1.1; }), "slack must be from 0 to 1");
  const std::string tight = "tight_from must be above 0 and at most 1";
  EXPECT_EQ(said_after([](Options& o) { o.tight_from = 0; }), tight);
  EXPECT_EQ(said_after([](Options& o) { o.tight_from = 1.1; }), tight);
  const std::string fences = "fence_frees and max_fences must be 1 or more";
  EXPECT_EQ(said_after([](Options& o) { o.fence_frees = 0; }), fences);
  EXPECT_EQ(said_after([](Options& o) { o.max_fences = 0; }), fences);
}

TEST(Options, TheEndsOfEachRangeAreInIt) {
  EXPECT_EQ(said_after([](Options& o) {
              o.small_limit = 512_B;
              o.hit_scan = o.miss_tries = o.max_aliases = 1;
              o.miss_runs = o.miss_extents = 0;
              o.price = o.price_pages = o.tight_price = 0;
              o.slack = 1;
              o.tight_from = 1;
              o.fence_frees = o.max_fences = 1;
              o.rest_handle = o.rest_handle_max = o.big_handle = o.big_handle_max = 64_MiB;
              o.cap = 0_B;
            }),
            "");
}

}  // namespace
}  // namespace gpumemx
