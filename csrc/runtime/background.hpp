// SPDX-License-Identifier: BSD-3-Clause
//
// The one thread that does for all devices what allocating threads need not wait for
// (DeviceAllocator::maintain), a driver call at a time.
//
// It starts with the first device, sleeps while there is nothing to do, is stopped at exit and is not
// there in a forked child. Everything works without it, only with more driver time in the requests.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/allocator.hpp"

namespace gpumemx {

class Background {
 public:
  // Memory that give_back_later() marked goes to the device when none of it was taken again for this
  // long: a program that goes on takes it within its next step.
  static constexpr std::chrono::milliseconds kQuiet{50};

  Background() = default;
  ~Background() { stop(); }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // `allocator` must live until stop() or abandon().
  void add(DeviceAllocator& allocator);
  // Some allocator has work for maintain().
  void wake();
  // give_back_later() was called.
  void expect_returning(DeviceAllocator& allocator);

  // Waits for the driver call that is under way, if any. May be called twice.
  void stop();
  // In a forked child, where the thread does not exist and its locks may be held for ever.
  void abandon();

 private:
  using Clock = std::chrono::steady_clock;
  struct Served {
    DeviceAllocator* allocator;
    bool returning = false;     // something was marked and has neither gone nor been taken yet
    Bytes seen;                 // how much, when last looked
    Clock::time_point since{};  // when that changed last
  };

  void run();
  void serve(Served& device);

  std::mutex mu_;  // with a condition variable, so not base/mutex.hpp
  std::condition_variable wanted_;
  std::vector<Served> devices_;  // guarded by mu_
  bool work_ = false;            // guarded by mu_
  bool stopping_ = false;        // guarded by mu_
  std::atomic<bool> stop_now_{false};
  std::thread* thread_ = nullptr;  // leaked by abandon(): its destructor would end the process
};

}  // namespace gpumemx
