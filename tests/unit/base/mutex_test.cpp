// SPDX-License-Identifier: BSD-3-Clause
#include "base/mutex.hpp"

#include <gtest/gtest.h>

namespace gpumemx {
namespace {

TEST(Mutex, KnowsWhetherTheCallerHoldsIt) {
  Mutex mu;
  EXPECT_FALSE(mu.held_by_caller());
  mu.lock();
  EXPECT_TRUE(mu.held_by_caller());
  mu.unlock();
  EXPECT_FALSE(mu.held_by_caller());
}

TEST(Mutex, IsNotHeldByAThreadWhileAnotherHoldsIt) {
  Mutex mu;
  MutexLock lock(mu);
  bool held_there = true, taken_there = true;
  std::thread([&] {
    held_there = mu.held_by_caller();
    taken_there = mu.try_lock();
    if (taken_there) mu.unlock();
  }).join();
  EXPECT_FALSE(held_there);
  EXPECT_FALSE(taken_there);
}

TEST(Mutex, TryLockTakesAFreeOne) {
  Mutex mu;
  ASSERT_TRUE(mu.try_lock());
  EXPECT_TRUE(mu.held_by_caller());
  mu.unlock();
}

TEST(MutexUnlock, LetsGoForAScopeAndTakesItAgain) {
  Mutex mu;
  {
    const MutexLock lock(mu);
    {
      const MutexUnlock open(mu);
      EXPECT_FALSE(mu.held_by_caller());
      ASSERT_TRUE(mu.try_lock());  // others can have it meanwhile
      mu.unlock();
    }
    EXPECT_TRUE(mu.held_by_caller());
  }
  EXPECT_FALSE(mu.held_by_caller());
}

#ifndef NDEBUG
TEST(MutexDeathTest, AssertHeldAbortsInDebugBuildsWithoutTheLock) {
  Mutex mu;
  EXPECT_DEATH(mu.assert_held(), "without the lock");
}
#endif

}  // namespace
}  // namespace gpumemx
