// SPDX-License-Identifier: BSD-3-Clause
#include "core/history.hpp"

#include <gtest/gtest.h>

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
  auto context = std::make_shared<const int>(1);
  const std::weak_ptr<const int> seen = context;
  HistoryEvent first = event(1);
  first.context = std::move(context);
  history.push(std::move(first));
  history.push(event(2));
  EXPECT_FALSE(seen.expired());
  history.push(event(3));
  EXPECT_TRUE(seen.expired());
  EXPECT_EQ(history.events()[0].address.n, 2u);
  EXPECT_EQ(history.events()[1].address.n, 3u);
  EXPECT_EQ(history.events().overwritten(), 1u);
}

}  // namespace
}  // namespace gpumemx
