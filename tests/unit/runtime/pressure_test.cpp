// SPDX-License-Identifier: BSD-3-Clause
//
// Who is asked for memory before a request fails, when, and what ends it.
#include "runtime/pressure.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"

namespace gpumemx {
namespace {

constexpr PressureInfo kInfo{1_GiB, {}, {}, 1, 64_MiB, 2_MiB};

TEST(Pressure, AsksAllInOrderAndSaysWhetherOneFreedSomething) {
  PressureCallbacks callbacks;
  EXPECT_FALSE(callbacks.ask(0, kInfo));
  std::vector<int> asked;
  const auto first = callbacks.add([&](int device, const PressureInfo& info) {
    EXPECT_EQ(device, 3);
    EXPECT_EQ(info.requested, 1_GiB);
    EXPECT_EQ(info.device_free, 64_MiB);
    EXPECT_EQ(info.cached, 2_MiB);
    asked.push_back(1);
    return true;
  });
  const auto second = callbacks.add([&](int, const PressureInfo&) {
    asked.push_back(2);
    return false;
  });
  EXPECT_TRUE(callbacks.ask(3, kInfo));
  EXPECT_EQ(asked, (std::vector<int>{1, 2}));

  callbacks.remove(first);
  EXPECT_FALSE(callbacks.ask(3, kInfo));
  EXPECT_EQ(asked, (std::vector<int>{1, 2, 2}));
  callbacks.remove(second);
  EXPECT_FALSE(callbacks.ask(3, kInfo));
  EXPECT_EQ(asked.size(), 3u);
}

TEST(Pressure, CountsAFunctionThatThrowsAsOneThatFreedNothing) {
  PressureCallbacks callbacks;
  const auto broken = callbacks.add(
      [](int, const PressureInfo&) -> bool { throw std::runtime_error("the model is gone"); });
  bool asked = false;
  const auto next = callbacks.add([&](int, const PressureInfo&) { return asked = true; });
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(callbacks.ask(0, kInfo));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "gpumemx: a callback of on_memory_pressure() failed: the model is gone\n");
  EXPECT_TRUE(asked);
}

TEST(Pressure, AsksNobodyForWhatAFunctionItselfAllocates) {
  PressureCallbacks callbacks;
  int asked = 0;
  const auto one = callbacks.add([&](int, const PressureInfo&) {
    ++asked;
    return callbacks.ask(0, kInfo);
  });
  EXPECT_FALSE(callbacks.ask(0, kInfo));
  EXPECT_EQ(asked, 1);
  EXPECT_FALSE(callbacks.ask(0, kInfo));  // and is asked again by the next request
  EXPECT_EQ(asked, 2);
}

TEST(Pressure, AFunctionMayEndItsOwnRegistration) {
  PressureCallbacks callbacks;
  std::shared_ptr<PressureCallbacks::Entry> self;
  int asked = 0;
  self = callbacks.add([&](int, const PressureInfo&) {
    ++asked;
    callbacks.remove(self);
    return true;
  });
  EXPECT_TRUE(callbacks.ask(0, kInfo));
  EXPECT_FALSE(callbacks.ask(0, kInfo));
  EXPECT_EQ(asked, 1);
}

TEST(PressureThreads, RemovingWaitsForTheThreadThatIsInIt) {
  PressureCallbacks callbacks;
  std::atomic<bool> is_in{false}, may_leave{false}, has_left{false};
  const auto entry = callbacks.add([&](int, const PressureInfo&) {
    is_in = true;
    while (!may_leave) std::this_thread::yield();
    has_left = true;
    return false;
  });
  std::thread asking([&] { (void)callbacks.ask(0, kInfo); });
  while (!is_in) std::this_thread::yield();
  std::thread leaving([&] { may_leave = true; });
  callbacks.remove(entry);
  EXPECT_TRUE(has_left);
  leaving.join();
  asking.join();
}

TEST(PressureThreads, AFunctionThatIsThereForEverRunsInSeveralThreadsAtOnce) {
  PressureCallbacks callbacks;
  std::atomic<int> inside{0};
  callbacks.add_for_ever([&](int, const PressureInfo&) {
    ++inside;
    while (inside < 2) std::this_thread::yield();  // each waits for the other
    return true;
  });
  std::thread other([&] { EXPECT_TRUE(callbacks.ask(0, kInfo)); });
  EXPECT_TRUE(callbacks.ask(1, kInfo));
  other.join();
}

TEST(Pressure, ARequestIsServedFromWhatAFunctionFreed) {
  SimOptions options;
  options.capacity = 64_MiB;
  SimDriver driver(options);
  DeviceAllocator allocator(driver, Options{});
  PressureCallbacks callbacks;
  PressureTeller teller(callbacks, 5);
  allocator.add_observer(&teller);
  const StreamInfo stream{{StreamId{1}, 0}, true};
  const auto allocate = [&](Bytes size) {
    return allocator.allocate({size, stream, kDefaultPool, 0, nullptr});
  };
  const AllocResult model = allocate(48_MiB);
  ASSERT_TRUE(model.ok());
  EXPECT_FALSE(allocate(32_MiB).ok());

  int device = -1;
  const auto entry = callbacks.add([&](int index, const PressureInfo& info) {
    device = index;
    EXPECT_EQ(info.requested, 32_MiB);
    allocator.free(model.address);
    return true;
  });
  const AllocResult served = allocate(32_MiB);
  EXPECT_TRUE(served.ok());
  EXPECT_EQ(device, 5);
  callbacks.remove(entry);
  allocator.free(served.address);
}

}  // namespace
}  // namespace gpumemx
