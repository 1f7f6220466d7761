// SPDX-License-Identifier: BSD-3-Clause
//
// Each mistake that a trace can have is found, at the right event and in the right words.
#include "replay/trace.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpumemx {
namespace {

// Allocates slot 0 (stream 0) and slot 1 (stream 1), frees both: consistent until a test changes it.
struct Arrays {
  std::vector<std::int64_t> op{0, 1, ~0, ~1};
  std::vector<std::int64_t> size{512, 1000, 512, 1000};
  std::vector<std::int16_t> stream{0, 1, 0, 1};
  std::vector<std::int64_t> time_us{0, 10, 10, 30};
  std::int64_t slots = 2;

  std::string mistake() const {
    return validate_trace({op, size, stream, time_us, slots}).value_or("none");
  }
};

TEST(ValidateTrace, AcceptsAConsistentTrace) { EXPECT_EQ(Arrays{}.mistake(), "none"); }

TEST(ValidateTrace, AcceptsATraceWithoutEvents) {
  EXPECT_EQ((Arrays{{}, {}, {}, {}, 0}.mistake()), "none");
}

TEST(ValidateTrace, AcceptsASlotThatIsUsedAgainAfterItsFree) {
  Arrays a;
  a.op = {0, ~0, 0, ~0};
  EXPECT_EQ(a.mistake(), "none");
}

TEST(ValidateTrace, AcceptsAnEmptyBlockAndBlocksThatAreNeverFreed) {
  Arrays a;
  a.op = {0, ~0, 0, 1};
  a.size[3] = 0;
  EXPECT_EQ(a.mistake(), "none");
}

TEST(ValidateTrace, IgnoresTheSizeOfAFree) {
  Arrays a;
  a.size[2] = -1;
  EXPECT_EQ(a.mistake(), "none");
}

TEST(ValidateTrace, NamesAllLengthsWhenOneDiffers) {
  Arrays a;
  a.size.pop_back();
  a.time_us.push_back(40);
  EXPECT_EQ(a.mistake(), "the arrays have unequal lengths: op 4, size 3, stream 4, time_us 5");
  a = {};
  a.stream.pop_back();
  EXPECT_EQ(a.mistake(), "the arrays have unequal lengths: op 4, size 4, stream 3, time_us 4");
}

TEST(ValidateTrace, RefusesANegativeNumberOfSlots) {
  Arrays a;
  a.slots = -1;
  EXPECT_EQ(a.mistake(), "slots is -1; it must not be negative");
}

TEST(ValidateTrace, RefusesMoreSlotsThanTheMachineCouldHold) {
  Arrays a;
  a.slots = kMaxSlots;
  EXPECT_EQ(a.mistake(), "none");
  a.slots = INT64_MAX;
  EXPECT_EQ(a.mistake(), "slots is 9223372036854775807; at most 16777216 are supported");
}

TEST(ValidateTrace, NamesTheEventWithANegativeSize) {
  Arrays a;
  a.size[1] = -7;
  EXPECT_EQ(a.mistake(), "event 1: size is -7; it must not be negative");
}

TEST(ValidateTrace, NamesTheEventWithANegativeStream) {
  Arrays a;
  a.stream[2] = -3;
  EXPECT_EQ(a.mistake(), "event 2: stream is -3; it must not be negative");
}

TEST(ValidateTrace, NamesTheEventThatAllocatesASlotOutOfRange) {
  Arrays a;
  a.op[1] = 2;
  EXPECT_EQ(a.mistake(), "event 1: slot 2 is out of range; slots is 2");
}

TEST(ValidateTrace, NamesTheEventThatFreesASlotOutOfRange) {
  Arrays a;
  a.op[3] = INT64_MIN;
  EXPECT_EQ(a.mistake(), "event 3: slot 9223372036854775807 is out of range; slots is 2");
}

TEST(ValidateTrace, NamesTheEventThatAllocatesALiveSlot) {
  Arrays a;
  a.op[1] = 0;
  EXPECT_EQ(a.mistake(), "event 1: slot 0 is allocated again before it was freed");
}

TEST(ValidateTrace, NamesTheEventThatFreesASlotBeforeItsAllocation) {
  Arrays a;
  a.op = {0, ~1, 1, ~0};
  EXPECT_EQ(a.mistake(), "event 1: slot 1 is freed but not allocated");
}

TEST(ValidateTrace, NamesTheEventThatFreesASlotTwice) {
  Arrays a;
  a.op[3] = ~0;
  EXPECT_EQ(a.mistake(), "event 3: slot 0 is freed but not allocated");
}

TEST(ValidateTrace, NamesTheEventWhereTimeGoesBack) {
  Arrays a;
  a.time_us[3] = 9;
  EXPECT_EQ(a.mistake(), "event 3: time_us goes back from 10 to 9");
}

TEST(ValidateTrace, RefusesTimesThatSumsWouldOverflow) {
  Arrays a;
  a.time_us[0] = -1;
  EXPECT_EQ(a.mistake(), "event 0: time_us is -1; it must be from 0 to 2^53");
  a = {};
  a.time_us[3] = kMaxTimeUs + 1;
  EXPECT_EQ(a.mistake(), "event 3: time_us is 9007199254740993; it must be from 0 to 2^53");
}

TEST(ValidateTrace, NamesTheFirstOfSeveralMistakes) {
  Arrays a;
  a.size[1] = -7;
  a.time_us[3] = 9;
  EXPECT_EQ(a.mistake(), "event 1: size is -7; it must not be negative");
}

}  // namespace
}  // namespace gpumemx
