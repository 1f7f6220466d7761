// SPDX-License-Identifier: BSD-3-Clause
#include "core/history.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/contexts.hpp"

namespace gpumemx {
namespace {

HistoryEvent event(std::uint64_t address) {
  HistoryEvent e{};
  e.address = {address};
  return e;
}

TEST(History, IsOffAtFirstAndAfterResetToZero) {
  History history;
  EXPECT_FALSE(history.on());
  history.reset(4, nullptr);
  EXPECT_TRUE(history.on());
  history.reset(0, nullptr);
  EXPECT_FALSE(history.on());
}

TEST(History, StampsEventsWithTheClockThatItWasGiven) {
  History history;
  history.reset(4, [] { return std::int64_t{1234}; });
  history.push(event(1));
  EXPECT_EQ(history.events()[0].time, 1234);
}

TEST(History, HasNoTimesWithoutAClock) {
  History history;
  history.reset(4, nullptr);
  history.push(event(1));
  EXPECT_EQ(history.events()[0].time, 0);
}

TEST(History, KeepsTheNewestAndDropsTheContextsOfTheOthers) {
  History history;
  history.reset(2, nullptr);
  int ended = 0;
  history.push(event(1), make_context(&ended));
  history.push(event(2));
  EXPECT_EQ(ended, 0);
  history.push(event(3));
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(history.events()[0].address.n, 2u);
  EXPECT_EQ(history.events()[1].address.n, 3u);
  EXPECT_EQ(history.events().overwritten(), 1u);
}

TEST(History, EveryEventOfALongRingLetsGoOfItsContextInItsTurn) {
  constexpr int kLength = 3000;  // chunks of the ring, and a rest
  History history;
  history.reset(kLength, nullptr);
  int ended = 0;
  for (int i = 0; i < 3 * kLength; ++i) {
    history.push(event(static_cast<std::uint64_t>(i)), make_context(&ended));
    ASSERT_EQ(ended, std::max(0, i + 1 - kLength));
  }
  history.reset(0, nullptr);
  EXPECT_EQ(ended, 3 * kLength);
}

TEST(History, EventsCarryTheCauseOfTheThreadThatMadeThem) {
  History history;
  history.reset(8, nullptr);
  const Cause outer{make_context(), std::make_shared<const int>(2)};
  const Cause inner{nullptr, std::make_shared<const int>(3)};
  const ContextRef own = make_context();
  const auto push = [&] { history.push(event(1), own); };
  push();
  {
    const CauseScope scope(outer);
    EXPECT_EQ(current_context(), outer.context);
    push();
    {
      const CauseScope nested(inner);
      EXPECT_EQ(current_context(), nullptr);
      push();
    }
    push();
  }
  EXPECT_EQ(current_context(), nullptr);
  push();
  const auto& events = history.events();
  EXPECT_EQ(events[0].context, own);  // an event's own context stands where no cause has one
  EXPECT_EQ(events[0].remark, nullptr);
  EXPECT_EQ(events[1].context, outer.context);
  EXPECT_EQ(events[1].remark, outer.remark);
  EXPECT_EQ(events[2].context, own);
  EXPECT_EQ(events[2].remark, inner.remark);
  EXPECT_EQ(events[3].context, outer.context);
  EXPECT_EQ(events[4].context, own);
}

TEST(History, LeavesOutWhatItsRulesSay) {
  History history;
  HistoryRules rules;
  rules.contexts = false;
  rules.skipped = 1u << static_cast<int>(EventKind::kFreeRequested);
  history.reset(8, nullptr, rules);
  HistoryEvent e = event(1);
  e.kind = EventKind::kFreeRequested;
  history.push(e, make_context());
  e.kind = EventKind::kFreeCompleted;
  history.push(e, make_context());
  ASSERT_EQ(history.events().size(), 1u);
  EXPECT_EQ(history.events()[0].kind, EventKind::kFreeCompleted);
  EXPECT_EQ(history.events()[0].context, nullptr);
  EXPECT_EQ(history.end(), 1u);
}

TEST(History, SerialNumbersGoOnOverAnotherRing) {
  History history;
  history.reset(2, nullptr);
  for (std::uint64_t i = 0; i < 5; ++i) history.push(event(i));
  EXPECT_EQ(history.begin(), 3u);
  EXPECT_EQ(history.end(), 5u);
  History other;
  other.reset(4, nullptr);
  history.exchange(other);
  EXPECT_EQ(history.begin(), 5u);
  history.push(event(6));
  EXPECT_EQ(history.begin(), 5u);
  EXPECT_EQ(history.end(), 6u);
  history.change(1, nullptr, {});
  history.push(event(7));
  EXPECT_EQ(history.begin(), 6u);
  EXPECT_EQ(history.events()[0].address.n, 7u);
}

TEST(History, AListenerIsToldWithAndWithoutARing) {
  struct Ear : HistoryListener {
    void on_event(const HistoryEvent& e) override { heard.push_back(e); }
    std::vector<HistoryEvent> heard;
  } ear;
  History history;
  history.set_listener(&ear, [] { return std::int64_t{5}; });
  EXPECT_TRUE(history.on());
  EXPECT_FALSE(history.recording());
  history.push(event(1));
  HistoryRules nothing;
  nothing.skipped = ~0u;
  history.reset(4, [] { return std::int64_t{6}; }, nothing);
  history.push(event(2));
  ASSERT_EQ(ear.heard.size(), 2u);
  EXPECT_EQ(ear.heard[0].time, 5);
  EXPECT_EQ(ear.heard[1].time, 6);
  EXPECT_EQ(history.events().size(), 0u);
  history.set_listener(nullptr, nullptr);
  history.reset(0, nullptr);
  EXPECT_FALSE(history.on());
}

}  // namespace
}  // namespace gpumemx
