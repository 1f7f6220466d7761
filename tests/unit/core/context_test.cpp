// SPDX-License-Identifier: BSD-3-Clause
#include "core/context.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "support/contexts.hpp"

namespace gpumemx {
namespace {

TEST(Context, EndsOnceWithItsLastReference) {
  int ended = 0;
  ContextRef first = make_context(&ended);
  ContextRef second = first;
  EXPECT_EQ(first, second);
  first = nullptr;
  EXPECT_EQ(ended, 0);
  EXPECT_NE(first, second);
  ContextRef third = std::move(second);
  EXPECT_EQ(second, nullptr);
  const ContextRef& itself = third;
  third = itself;
  EXPECT_EQ(ended, 0);
  third = make_context();
  EXPECT_EQ(ended, 1);
}

TEST(Context, ABorrowedOneIsReferredToAnew) {
  int ended = 0;
  ContextRef owner = make_context(&ended);
  ContextRef other(owner.get());
  owner = nullptr;
  EXPECT_EQ(ended, 0);
  other = nullptr;
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(ContextRef(static_cast<Context*>(nullptr)), nullptr);
}

TEST(Context, ThreadsMayLetGoAtTheSameTime) {
  int ended = 0;
  for (int round = 0; round < 200; ++round) {
    ContextRef context = make_context(&ended);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([mine = context]() mutable { mine = nullptr; });
    }
    context = nullptr;
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(ended, round + 1);
  }
}

}  // namespace
}  // namespace gpumemx
