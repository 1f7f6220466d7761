// SPDX-License-Identifier: BSD-3-Clause
#include "base/mutex.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace gpumemx {
namespace {

// Whether the mutex knows its holder rightly; release builds do not keep it.
bool held([[maybe_unused]] const Mutex& mu, [[maybe_unused]] bool expected) {
#ifdef NDEBUG
  return true;
#else
  return mu.held_by_caller() == expected;
#endif
}

TEST(Mutex, KnowsWhetherTheCallerHoldsIt) {
  Mutex mu;
  EXPECT_TRUE(held(mu, false));
  mu.lock();
  EXPECT_TRUE(held(mu, true));
  mu.unlock();
  EXPECT_TRUE(held(mu, false));
}

TEST(Mutex, IsNotHeldByAThreadWhileAnotherHoldsIt) {
  Mutex mu;
  MutexLock lock(mu);
  bool held_there = true, taken_there = true;
  std::thread([&] {
    held_there = !held(mu, false);
    taken_there = mu.try_lock();
    if (taken_there) mu.unlock();
  }).join();
  EXPECT_FALSE(held_there);
  EXPECT_FALSE(taken_there);
}

TEST(Mutex, TryLockTakesAFreeOne) {
  Mutex mu;
  ASSERT_TRUE(mu.try_lock());
  EXPECT_TRUE(held(mu, true));
  mu.unlock();
}

TEST(MutexUnlock, LetsGoForAScopeAndTakesItAgain) {
  Mutex mu;
  {
    const MutexLock lock(mu);
    {
      const MutexUnlock open(mu);
      EXPECT_TRUE(held(mu, false));
      ASSERT_TRUE(mu.try_lock());  // others can have it meanwhile
      mu.unlock();
    }
    EXPECT_TRUE(held(mu, true));
  }
  EXPECT_TRUE(held(mu, false));
}

TEST(Mutex, ThreadsThatWaitAllGetTheirTurn) {
  Mutex mu;
  std::int64_t count = 0;  // not atomic: the mutex guards it
  constexpr int kThreads = 8, kTurns = 20000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kTurns; ++i) {
        const MutexLock lock(mu);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, kThreads * kTurns);
}

#ifndef NDEBUG
TEST(MutexDeathTest, AssertHeldAbortsInDebugBuildsWithoutTheLock) {
  Mutex mu;
  EXPECT_DEATH(mu.assert_held(), "without the lock");
}
#endif

}  // namespace
}  // namespace gpumemx
