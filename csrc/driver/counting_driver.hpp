// SPDX-License-Identifier: BSD-3-Clause
//
// A decorator that forwards every call to another driver, times it and charges a meter: what the
// simulation does with modelled time, on a device with real time. free(), wait(), synchronize()
// and hold() include the work that they wait for.
//
// A set_access() over n mappings is charged as n calls of equal time, as in SimDriver.
// Thread-safe; holds no lock while it forwards.
#pragma once

#include <map>
#include <vector>

#include "base/mutex.hpp"
#include "driver/device_driver.hpp"
#include "driver/meter.hpp"

namespace gpumemx {

class CountingDriver final : public DeviceDriver {
 public:
  // Keeps a reference to `real`, which must outlive this.
  explicit CountingDriver(DeviceDriver& real) : real_(real) {}

  const DeviceTraits& traits() const noexcept override { return real_.traits(); }
  Result<AddrRange> reserve(Bytes size, Bytes alignment) override GPUMEMX_EXCLUDES(mu_);
  Status unreserve(AddrRange range) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> create(Bytes size) override GPUMEMX_EXCLUDES(mu_);
  Status release(HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  Status map(AddrRange range, HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  using DeviceDriver::set_access;
  Status set_access(AddrRange range, const std::vector<int>& peers) override GPUMEMX_EXCLUDES(mu_);
  Status unmap(AddrRange range) override GPUMEMX_EXCLUDES(mu_);
  Result<int> export_handle(HandleId handle) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> import_handle(int fd) override GPUMEMX_EXCLUDES(mu_);
  Result<HandleId> import_fabric(const FabricHandle& exported) override GPUMEMX_EXCLUDES(mu_);
  Result<DeviceAddr> allocate(Bytes size) override GPUMEMX_EXCLUDES(mu_);
  Status free(DeviceAddr address) override GPUMEMX_EXCLUDES(mu_);
  Result<StreamId> stream_id(std::uint64_t native) override { return real_.stream_id(native); }
  Result<EventId> record(StreamRef stream) override GPUMEMX_EXCLUDES(mu_);
  Result<bool> query(EventId event) override GPUMEMX_EXCLUDES(mu_);
  Status wait(EventId event) override GPUMEMX_EXCLUDES(mu_);
  Result<std::size_t> wait_any(const std::vector<EventId>& events) override GPUMEMX_EXCLUDES(mu_);
  void recycle(EventId event) override { real_.recycle(event); }
  CaptureMode exchange_capture_mode(CaptureMode mode) override {
    return real_.exchange_capture_mode(mode);
  }
  Result<DeviceMemory> memory() override GPUMEMX_EXCLUDES(mu_);
  Status synchronize() override GPUMEMX_EXCLUDES(mu_);
  Status copy(DeviceAddr to, DeviceAddr from, Bytes size) override GPUMEMX_EXCLUDES(mu_);
  Result<HoldId> hold(const std::vector<StreamRef>& streams) override GPUMEMX_EXCLUDES(mu_);
  void let_go(HoldId hold) override { real_.let_go(hold); }

  DriverFigures figures() const GPUMEMX_EXCLUDES(mu_);

 private:
  struct Mapping {
    Bytes size;
    HandleId handle;
  };

  // Runs `forward`, charges its time to `call`, returns its result.
  template <class Forward>
  auto timed(DriverCall call, HandleId handle, Forward forward) GPUMEMX_EXCLUDES(mu_);
  void charge(DriverCall call, double seconds, bool ok, HandleId handle, Bytes size)
      GPUMEMX_EXCLUDES(mu_);

  DeviceDriver& real_;

  mutable Mutex mu_;  // a leaf
  DriverMeter meter_ GPUMEMX_GUARDED_BY(mu_);
  std::map<DeviceAddr, Mapping> mappings_ GPUMEMX_GUARDED_BY(mu_);  // whom set_access() concerns
};

}  // namespace gpumemx
