// SPDX-License-Identifier: BSD-3-Clause
//
// A13: who is asked to free memory, when, and with which numbers.
#include "core/observer.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "unit/core/core_tools.hpp"

namespace gpumemx {
namespace {

struct Recorder : Observer {
  bool on_pressure(const PressureInfo& info) override {
    asked.push_back(info);
    return act ? act() : false;
  }
  void on_out_of_memory(const OomVerdict& verdict) override {
    verdicts.push_back(verdict);
    if (then) then();
  }
  std::vector<PressureInfo> asked;
  std::vector<OomVerdict> verdicts;
  std::function<bool()> act;
  std::function<void()> then;
};

class ObserverTest : public AllocatorTest {
 protected:
  ObserverTest() : AllocatorTest(device_of(4_GiB)) { allocator_->add_observer(&observer_); }
  Recorder observer_;
};

TEST_F(ObserverTest, IsNotAskedOnOrdinaryMissesNorWhenWaitingHelps) {
  const DeviceAddr a = alloc(2_GiB);
  free(a);
  alloc(1_GiB, new_stream());
  gpu_.set_lag_us(1000);
  free(alloc(2_GiB));
  alloc(3_GiB, new_stream());  // waits
  EXPECT_EQ(paths().waits > 0, true);
  EXPECT_TRUE(observer_.asked.empty());
  EXPECT_TRUE(observer_.verdicts.empty());
}

TEST_F(ObserverTest, IsAskedOnceWithTheNumbersAndThenToldTheVerdict) {
  alloc(3_GiB);
  const StreamInfo other = new_stream();
  EXPECT_FALSE(try_alloc(2_GiB, other).ok());
  ASSERT_EQ(observer_.asked.size(), 1u);
  const PressureInfo& info = observer_.asked[0];
  EXPECT_EQ(info.requested, 2_GiB);
  EXPECT_EQ(info.stream, other.ref);
  EXPECT_EQ(info.pool, kDefaultPool);
  EXPECT_EQ(info.attempt, 1);
  EXPECT_EQ(info.device_free + info.cached, 1_GiB);
  ASSERT_EQ(observer_.verdicts.size(), 1u);
  EXPECT_EQ(observer_.verdicts[0].cause, OomCause::kFull);
  EXPECT_EQ(paths().callbacks, 1u);
  EXPECT_EQ(stats().num_ooms, 1u);
  EXPECT_EQ(stats().num_alloc_retries, 0u);
}

TEST_F(ObserverTest, MayFreeMemoryAndThenTheRequestIsTriedAgain) {
  const DeviceAddr cache = alloc(3_GiB);
  observer_.act = [&] {  // no lock is held: it may call the allocator
    allocator_->free(cache);
    EXPECT_EQ(allocator_->stats().allocation.all().current, 0);
    return true;
  };
  alloc(2_GiB);
  EXPECT_EQ(observer_.asked.size(), 1u);
  EXPECT_TRUE(observer_.verdicts.empty());
  EXPECT_EQ(stats().num_alloc_retries, 1u);
  EXPECT_EQ(stats().num_ooms, 0u);
}

TEST_F(ObserverTest, WhoSaysThatItFreedButDidNotIsAskedOnlyOnce) {
  alloc(3_GiB);
  observer_.act = [] { return true; };
  EXPECT_FALSE(try_alloc(2_GiB).ok());
  EXPECT_EQ(observer_.asked.size(), 1u);
  EXPECT_EQ(observer_.verdicts.size(), 1u);
}

TEST_F(ObserverTest, AllAreAskedInTheOrderOfRegistrationEvenIfOneFreed) {
  alloc(3_GiB);
  Recorder second;
  std::vector<int> order;
  observer_.act = [&] {
    order.push_back(1);
    return true;
  };
  second.act = [&] {
    order.push_back(2);
    return false;
  };
  allocator_->add_observer(&second);
  EXPECT_FALSE(try_alloc(2_GiB).ok());
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_EQ(paths().callbacks, 2u);
  allocator_->remove_observer(&second);
  EXPECT_FALSE(try_alloc(2_GiB).ok());
  EXPECT_EQ(second.asked.size(), 1u);
  EXPECT_EQ(observer_.asked.size(), 2u);
}

TEST_F(ObserverTest, MayUseTheAllocatorWhenItIsToldTheVerdict) {
  allocator_->record_history(8);
  alloc(3_GiB);
  std::size_t events = 0;
  observer_.then = [&] { events = allocator_->history().size(); };
  EXPECT_FALSE(try_alloc(2_GiB).ok());
  EXPECT_GE(events, 2u);  // a dump made here has the failed request in it
  EXPECT_EQ(allocator_->history().back().kind, EventKind::kOutOfMemory);
}

TEST_F(ObserverTest, NeedsNeitherOfTheTwoFunctions) {
  Observer silent;
  allocator_->add_observer(&silent);
  alloc(3_GiB);
  EXPECT_FALSE(try_alloc(2_GiB).ok());
  EXPECT_EQ(paths().callbacks, 2u);
}

TEST_F(ObserverTest, IsToldOfRequestsThatAreRefusedOutright) {
  EXPECT_FALSE(try_alloc({~0ull}).ok());
  EXPECT_TRUE(observer_.asked.empty());
  ASSERT_EQ(observer_.verdicts.size(), 1u);
  EXPECT_EQ(observer_.verdicts[0].cause, OomCause::kNonsenseSize);
}

}  // namespace
}  // namespace gpumemx
