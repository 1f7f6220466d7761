// SPDX-License-Identifier: BSD-3-Clause
//
// One allocator a device, for the whole process. Devices are opened at their first use, so that
// having gpumemx installed starts no CUDA.
//
// The registry is leaked on purpose: tensors die during the interpreter's exit and in static
// destructors, after everything else. Two ends are handled:
//
//   exit   from the moment that exit() runs our handler, no driver call is made; frees are ignored; the
//          background thread is stopped.
//   fork   CUDA does not work in a forked child, so there everything is shut down at once, before
//          any lock that another thread of the parent may have held is touched.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.hpp"
#include "core/allocator.hpp"
#include "driver/counting_driver.hpp"
#include "driver/device_driver.hpp"
#include "monitor/scope.hpp"
#include "runtime/background.hpp"
#include "runtime/pressure.hpp"

namespace gpumemx {

struct Device {
  std::unique_ptr<DeviceDriver> driver;
  std::unique_ptr<CountingDriver> counting;  // in front of `driver`
  std::unique_ptr<DeviceAllocator> allocator;
  std::unique_ptr<ScopeBoard> scopes;
  std::unique_ptr<PressureTeller> pressure;
  Bytes total;                                            // of the device's memory
  std::atomic<std::int64_t> last_emptied_ms{-1'000'000};  // of the steady clock
  std::atomic<int> emptied_in_a_row{0};                   // each within a second of the one before
};

class DeviceRegistry {
 public:
  using OpenDriver = std::function<Result<std::unique_ptr<DeviceDriver>>(int device)>;
  static constexpr int kMaxDevices = 64;

  static DeviceRegistry& instance();

  // What devices are opened with from now on. `observer` (or null) is told of every device's pressure
  // and must live for ever. REQUIRES: options.validate() finds nothing.
  void configure(Options options, OpenDriver open, Observer* observer) GPUMEMX_EXCLUDES(mu_);

  // How many devices there are; may be called again, and may grow.
  void set_device_count(int count);
  int device_count() const { return count_.load(std::memory_order_acquire); }

  // Calls `setup` with every device: now with those that are open, in turn, and later with each that
  // is opened, before anybody else can use it. Replaces the setup of an earlier call; null for none.
  // It is called under the registry's lock, and must not use the registry.
  using Setup = std::function<void(int index, Device& device)>;
  void apply_to_all(Setup setup) GPUMEMX_EXCLUDES(mu_);

  // Opens the device at its first use. Fails with the driver's error.
  Result<Device*> device(int index) GPUMEMX_EXCLUDES(mu_);
  // Never opens anything; null when the device was not used yet.
  Device* if_open(int index) const {
    return index < 0 || index >= kMaxDevices
               ? nullptr
               : devices_[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
  }
  // The scopes of a device. Null before its first use: then there is nothing to measure yet.
  ScopeBoard* scopes(int index) const {
    const Device* device = if_open(index);
    return device == nullptr ? nullptr : device->scopes.get();
  }
  // The open device whose block begins at `address`, or -1.
  int owner_of(DeviceAddr address) const;

  // Whom the allocators of all devices ask for memory before a request fails.
  PressureCallbacks& pressure() { return pressure_; }

  // A cap as a share of the device's memory, [0, 1]; kept for devices that are not open yet.
  // REQUIRES: index is from 0 to kMaxDevices - 1.
  void set_fraction(int index, double fraction) GPUMEMX_EXCLUDES(mu_);
  double fraction(int index) const GPUMEMX_EXCLUDES(mu_);

  // Gives back what is idle, at once. From the fourth call on that comes within a second of the one
  // before, as in programs that empty the cache in every step, what the next step will need again is
  // only marked: the background thread returns it when nothing takes it (runtime/background.hpp).
  void empty_cache(Device& device);

  void shut_down();
  bool is_shut_down() const { return shut_down_.load(); }

 private:
  DeviceRegistry();
  void be_a_forked_child();
  static void apply_fraction(Device& device, double fraction);

  std::atomic<int> count_{0};
  std::atomic<bool> shut_down_{false};
  std::array<std::atomic<Device*>, kMaxDevices> devices_{};

  PressureCallbacks pressure_;
  Background background_;  // runs when Options::background is set

  mutable Mutex mu_;
  Options options_ GPUMEMX_GUARDED_BY(mu_);
  OpenDriver open_ GPUMEMX_GUARDED_BY(mu_);
  Observer* observer_ GPUMEMX_GUARDED_BY(mu_) = nullptr;
  Setup setup_ GPUMEMX_GUARDED_BY(mu_);
  std::array<std::optional<double>, kMaxDevices> fractions_ GPUMEMX_GUARDED_BY(mu_);
};

}  // namespace gpumemx
