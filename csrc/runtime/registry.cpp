// SPDX-License-Identifier: BSD-3-Clause
#include "runtime/registry.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>

namespace gpumemx {

DeviceRegistry::DeviceRegistry() {
  // The child's handler takes no lock; the one at exit waits for the background thread, which holds one
  // for no longer than a driver call. Registered when the first allocator is configured, which is after
  // the libraries that it must outlive were loaded, so it runs before their static destructors.
  std::atexit([] { instance().shut_down(); });
  pthread_atfork(nullptr, nullptr, [] { instance().be_a_forked_child(); });
}

DeviceRegistry& DeviceRegistry::instance() {
  static DeviceRegistry* registry = new DeviceRegistry;  // leaked: see the header
  return *registry;
}

void DeviceRegistry::configure(Options options, OpenDriver open, Observer* observer) {
  MutexLock lock(mu_);
  options_ = std::move(options);
  open_ = std::move(open);
  observer_ = observer;
}

void DeviceRegistry::set_device_count(int count) {
  int before = count_.load();
  count = std::min(count, kMaxDevices);
  while (before < count && !count_.compare_exchange_weak(before, count)) {
  }
}

void DeviceRegistry::apply_to_all(Setup setup) {
  MutexLock lock(mu_);
  for (int i = 0; i < kMaxDevices && setup; ++i) {
    if (Device* device = if_open(i)) setup(i, *device);
  }
  setup_ = std::move(setup);
}

Result<Device*> DeviceRegistry::device(int index) {
  if (Device* open = if_open(index)) return open;
  if (index < 0 || index >= device_count()) {
    return Error{Errc::kInvalidArgument,
                 {},
                 "device " + std::to_string(index) + " of " + std::to_string(device_count())};
  }
  if (shut_down_) return Error{Errc::kShuttingDown, {}, "the process is exiting, or was forked"};
  MutexLock lock(mu_);
  if (Device* open = if_open(index)) return open;
  auto driver = open_(index);
  if (!driver.ok()) return driver.error();
  auto device = std::make_unique<Device>();
  device->driver = std::move(driver).take();
  device->counting = std::make_unique<CountingDriver>(*device->driver);
  device->allocator = std::make_unique<DeviceAllocator>(*device->counting, options_);
  device->scopes = std::make_unique<ScopeBoard>(*device->allocator, *device->counting);
  if (observer_ != nullptr) device->allocator->add_observer(observer_);
  device->pressure = std::make_unique<PressureTeller>(pressure_, index);
  device->allocator->add_observer(device->pressure.get());
  if (const auto memory = device->counting->memory(); memory.ok()) {
    device->total = memory.value().total;
  }
  if (const auto fraction = fractions_[static_cast<std::size_t>(index)]) {
    apply_fraction(*device, *fraction);
  }
  if (options_.background) {
    device->allocator->set_maintenance_hook([this] { background_.wake(); });
    background_.add(*device->allocator);
  }
  if (setup_) setup_(index, *device);
  Device* raw = device.release();
  devices_[static_cast<std::size_t>(index)].store(raw, std::memory_order_release);
  return raw;
}

int DeviceRegistry::owner_of(DeviceAddr address) const {
  for (int i = 0; i < device_count(); ++i) {
    const Device* device = if_open(i);
    if (device != nullptr && device->allocator->owns(address)) return i;
  }
  return -1;
}

void DeviceRegistry::apply_fraction(Device& device, double fraction) {
  device.allocator->set_cap(
      {static_cast<std::uint64_t>(fraction * static_cast<double>(device.total.n))});
}

void DeviceRegistry::set_fraction(int index, double fraction) {
  MutexLock lock(mu_);
  fractions_[static_cast<std::size_t>(index)] = fraction;
  if (Device* device = if_open(index)) apply_fraction(*device, fraction);
}

double DeviceRegistry::fraction(int index) const {
  MutexLock lock(mu_);
  return fractions_[static_cast<std::size_t>(index)].value_or(1.0);
}

void DeviceRegistry::empty_cache(Device& device) {
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::steady_clock::now().time_since_epoch())
                       .count();
  constexpr std::int64_t kSoon = 1000;
  constexpr int kHabit = 3;  // two or three calls in a row are somebody who waits for the memory
  const bool soon = now - device.last_emptied_ms.exchange(now) < kSoon;
  const int in_a_row = soon ? device.emptied_in_a_row.fetch_add(1) + 1 : 0;
  if (!soon) device.emptied_in_a_row = 0;
  if (in_a_row >= kHabit && device.allocator->options().background) {
    if (const auto marked = device.allocator->give_back_later()) {
      if (marked->n > 0) background_.expect_returning(*device.allocator);
      return;
    }
  }
  (void)device.allocator->trim({});
}

void DeviceRegistry::shut_down() {
  shut_down_ = true;
  for (auto& device : devices_) {
    if (Device* d = device.load(std::memory_order_acquire)) d->allocator->shut_down();
  }
  background_.stop();
}

void DeviceRegistry::be_a_forked_child() {
  background_.abandon();
  shut_down();
}

}  // namespace gpumemx
