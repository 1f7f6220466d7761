// SPDX-License-Identifier: BSD-3-Clause
#include "core/timeline.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

class TimelineTest : public ::testing::Test {
 protected:
  std::vector<std::uint64_t> fence_epochs() {
    std::vector<std::uint64_t> out;
    while (line_.has_fences()) {
      out.push_back(line_.oldest().epoch);
      line_.drop_oldest();
    }
    return out;
  }
  Timeline line_{{{StreamId{3}, 77}, false}};
};

TEST_F(TimelineTest, BeginsInEpochOneWithNothingDone) {
  EXPECT_EQ(line_.epoch(), 1u);
  EXPECT_EQ(line_.done(), 0u);
  EXPECT_FALSE(line_.has_fences());
  EXPECT_EQ(line_.newest(), nullptr);
  EXPECT_EQ(line_.stream().ref.id, StreamId{3});
  EXPECT_FALSE(line_.stream().permanent);
}

TEST_F(TimelineTest, AdvanceEndsTheEpochWithItsFrees) {
  line_.note_free(1_MiB);
  line_.note_free(2_MiB);
  EXPECT_EQ(line_.open_frees(), 2u);
  EXPECT_EQ(line_.open_bytes(), 3_MiB);
  EXPECT_EQ(line_.advance(), 1u);
  EXPECT_EQ(line_.epoch(), 2u);
  EXPECT_EQ(line_.open_frees(), 0u);
  EXPECT_EQ(line_.open_bytes(), 0_B);
}

TEST_F(TimelineTest, AFreeBetweenAdvanceAndTheEventWaitsForALaterEvent) {
  const std::uint64_t first = line_.advance();
  const Stamp late{&line_, line_.epoch()};  // freed after the epoch ended, before its event is here
  line_.add_fence(first, EventId{1}, 1);
  line_.reached(first);
  EXPECT_FALSE(late.complete());
  const std::uint64_t second = line_.advance();
  line_.reached(second);
  EXPECT_TRUE(late.complete());
}

TEST_F(TimelineTest, TheFreesOfALostEventAreOpenAgain) {
  line_.note_free(1_MiB);
  const std::uint64_t first = line_.advance(), second = line_.advance();
  line_.add_fence(first, EventId{1}, 1);
  line_.add_fence(second, EventId{2}, 2);
  line_.find(EventId{1})->waiters = 1;
  EXPECT_FALSE(line_.lose(EventId{1}));  // somebody waits on it
  EXPECT_FALSE(line_.lose(EventId{3}));
  EXPECT_EQ(line_.open_frees(), 0u);
  line_.find(EventId{1})->waiters = 0;
  EXPECT_TRUE(line_.lose(EventId{1}));
  EXPECT_EQ(line_.open_frees(), 1u);
  EXPECT_EQ(fence_epochs(), (std::vector<std::uint64_t>{second}));
}

TEST_F(TimelineTest, AReachedEpochCompletesAllStampsUpToIt) {
  const Stamp one{&line_, line_.advance()}, two{&line_, line_.advance()},
      three{&line_, line_.advance()};
  line_.reached(2);
  EXPECT_TRUE(one.complete());
  EXPECT_TRUE(two.complete());
  EXPECT_FALSE(three.complete());
}

TEST_F(TimelineTest, DoneNeverGoesBack) {
  line_.reached(5);
  line_.reached(3);
  EXPECT_EQ(line_.done(), 5u);
}

TEST_F(TimelineTest, AStampOfNoStreamIsComplete) { EXPECT_TRUE(Stamp{}.complete()); }

TEST_F(TimelineTest, FencesAreKeptByEpochHoweverTheyCome) {
  line_.add_fence(2, EventId{20}, 1);
  line_.add_fence(4, EventId{40}, 2);
  line_.add_fence(1, EventId{10}, 3);
  line_.add_fence(3, EventId{30}, 4);
  EXPECT_EQ(line_.fences(), 4u);
  EXPECT_EQ(line_.oldest().event, EventId{10});
  EXPECT_EQ(line_.newest()->event, EventId{40});
  EXPECT_EQ(fence_epochs(), (std::vector<std::uint64_t>{1, 2, 3, 4}));
}

TEST_F(TimelineTest, FindsAFenceByItsEvent) {
  line_.add_fence(1, EventId{10}, 7);
  line_.add_fence(2, EventId{20}, 8);
  ASSERT_NE(line_.find(EventId{20}), nullptr);
  EXPECT_EQ(line_.find(EventId{20})->serial, 8u);
  EXPECT_EQ(line_.find(EventId{30}), nullptr);
}

TEST_F(TimelineTest, PopsOnlyEventsThatAreReached) {
  for (std::uint64_t e = 1; e <= 3; ++e) line_.add_fence(e, EventId{e * 10}, e);
  EXPECT_EQ(line_.pop_reached(), std::nullopt);
  line_.reached(2);
  EXPECT_EQ(line_.pop_reached(), EventId{10});
  EXPECT_EQ(line_.pop_reached(), EventId{20});
  EXPECT_EQ(line_.pop_reached(), std::nullopt);
  EXPECT_EQ(line_.fences(), 1u);
}

TEST_F(TimelineTest, DoesNotPopAnEventThatSomebodyWaitsFor) {
  for (std::uint64_t e = 1; e <= 3; ++e) line_.add_fence(e, EventId{e * 10}, e);
  line_.find(EventId{10})->waiters = 1;
  line_.reached(2);
  EXPECT_EQ(line_.pop_reached(), EventId{20});
  EXPECT_EQ(line_.pop_reached(), std::nullopt);
  line_.find(EventId{10})->waiters = 0;
  EXPECT_EQ(line_.pop_reached(), EventId{10});
}

TEST_F(TimelineTest, TheOldestOpenEventIsTheFirstThatWasNotReached) {
  EXPECT_EQ(line_.oldest_open(), nullptr);
  for (std::uint64_t e = 1; e <= 3; ++e) line_.add_fence(e, EventId{e * 10}, e);
  EXPECT_EQ(line_.oldest_open()->event, EventId{10});
  line_.reached(2);
  EXPECT_EQ(line_.oldest_open()->event, EventId{30});
  line_.reached(3);
  EXPECT_EQ(line_.oldest_open(), nullptr);
}

TEST_F(TimelineTest, AsksFurtherOnWhileTheAnswersAreYesAndNearerAfterANo) {
  EXPECT_EQ(line_.next_to_ask(), nullptr);
  for (std::uint64_t e = 1; e <= 20; ++e) line_.add_fence(line_.advance(), EventId{e}, e);
  const auto answer = [&](bool is_reached) {
    const std::uint64_t epoch = line_.next_to_ask()->epoch;
    line_.note_answer(is_reached);
    if (is_reached) line_.reached(epoch);
    return epoch;
  };
  EXPECT_EQ(answer(true), 1u);
  EXPECT_EQ(answer(true), 3u);  // which says the same of the second
  EXPECT_EQ(answer(true), 7u);
  EXPECT_EQ(answer(false), 11u);  // never more than three are passed over
  EXPECT_EQ(answer(false), 9u);
  EXPECT_EQ(answer(false), 8u);  // the oldest
  EXPECT_EQ(answer(true), 8u);
  line_.reached(19);
  EXPECT_EQ(answer(true), 20u);  // there is none further on
  EXPECT_EQ(line_.next_to_ask(), nullptr);
}

TEST_F(TimelineTest, OwesAnEventUntilTheNextIsRecorded) {
  EXPECT_FALSE(line_.owes_event());
  line_.advance();
  line_.reopen(1, {});
  EXPECT_TRUE(line_.owes_event());
  line_.advance();
  EXPECT_FALSE(line_.owes_event());
}

TEST_F(TimelineTest, ReopenMakesTheFreesOfAnEventThatFailedCountAgain) {
  line_.note_free(4_MiB);
  line_.advance();
  line_.note_free(1_MiB);
  line_.reopen(1, 4_MiB);
  EXPECT_EQ(line_.open_frees(), 2u);
  EXPECT_EQ(line_.open_bytes(), 5_MiB);
  // The later event covers the epoch whose own event failed.
  const Stamp first{&line_, 1};
  line_.reached(line_.advance());
  EXPECT_TRUE(first.complete());
}

}  // namespace
}  // namespace gpumemx
