// SPDX-License-Identifier: BSD-3-Clause
#include "runtime/background.hpp"

#include <algorithm>

#include "driver/meter.hpp"

namespace gpumemx {

namespace {

// Between two driver calls while a program allocates: its own calls get in (the driver's lock is
// unfair, docs/design.md).
constexpr std::chrono::microseconds kPause{100};
constexpr std::chrono::milliseconds kLook{10};  // how often marked memory is looked at

}  // namespace

void Background::add(DeviceAllocator& allocator) {
  const std::lock_guard lock(mu_);
  devices_.push_back({&allocator, false, {}, {}});
  if (thread_ == nullptr) thread_ = new std::thread([this] { run(); });
}

void Background::wake() {
  {
    const std::lock_guard lock(mu_);
    work_ = true;
  }
  wanted_.notify_one();
}

void Background::expect_returning(DeviceAllocator& allocator) {
  {
    const std::lock_guard lock(mu_);
    for (Served& device : devices_) {
      if (device.allocator == &allocator) device = {&allocator, true, Bytes{~0ull}, Clock::now()};
    }
  }
  wanted_.notify_one();
}

void Background::stop() {
  if (thread_ == nullptr) return;
  {
    const std::lock_guard lock(mu_);
    stopping_ = true;
    stop_now_ = true;
  }
  wanted_.notify_one();
  thread_->join();
  delete thread_;
  thread_ = nullptr;
}

void Background::abandon() { thread_ = nullptr; }

void Background::run() {
  const CallerRoleScope role(CallerRole::kBackground);
  std::unique_lock lock(mu_);
  while (!stopping_) {
    const bool watching = std::any_of(devices_.begin(), devices_.end(),
                                      [](const Served& device) { return device.returning; });
    const auto something = [&] { return work_ || stopping_; };
    if (watching) {
      wanted_.wait_for(lock, kLook, something);
    } else {
      // A device that begins to return memory notifies without `work_`.
      wanted_.wait(lock, [&] {
        return something() || std::any_of(devices_.begin(), devices_.end(),
                                          [](const Served& d) { return d.returning; });
      });
    }
    work_ = false;
    for (std::size_t i = 0; i < devices_.size() && !stopping_; ++i) {
      Served device = devices_[i];
      lock.unlock();
      serve(device);
      lock.lock();
      // Unless memory was marked anew meanwhile, what was seen stands.
      if (devices_[i].since <= device.since) devices_[i] = device;
    }
  }
}

void Background::serve(Served& device) {
  DeviceAllocator& allocator = *device.allocator;
  while (!stop_now_ && allocator.maintain()) std::this_thread::sleep_for(kPause);
  if (!device.returning) return;

  const Bytes now = allocator.returning();
  if (now != device.seen) {
    device.seen = now;
    device.since = Clock::now();
  }
  if (now.n == 0) {
    device.returning = false;
    return;
  }
  if (Clock::now() - device.since < kQuiet) return;
  // Nobody allocates, so nobody is in the way of a call.
  while (!stop_now_ && allocator.maintain(/*release_returning=*/true)) {
  }
  device.seen = allocator.returning();
  device.since = Clock::now();
}

}  // namespace gpumemx
