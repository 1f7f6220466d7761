// SPDX-License-Identifier: BSD-3-Clause
//
// What the contract suite needs of a device besides its driver: streams, work whose effect can be
// looked at, work that stays pending, and captures. One implementation for each driver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "driver/device_driver.hpp"

namespace gpumemx {

class ContractDevice {
 public:
  virtual ~ContractDevice() = default;
  virtual DeviceDriver& driver() = 0;

  virtual StreamRef new_stream() = 0;
  // Queue work. check() compares when it runs; finish() tells. REQUIRES: value != 0; a range of at
  // most 4 MiB, in multiples of 512 B.
  virtual void fill(StreamRef stream, AddrRange range, std::uint32_t value) = 0;
  virtual void check(StreamRef stream, AddrRange range, std::uint32_t value) = 0;

  // Work queued after hold() stays pending until let_go(), which does not wait for it.
  virtual void hold(StreamRef stream) = 0;
  virtual void let_go(StreamRef stream) = 0;

  virtual void begin_capture(StreamRef stream, CaptureMode mode) = 0;
  virtual bool end_capture(StreamRef stream) = 0;  // false when something made it invalid

  // Runs all queued work. What went wrong since the last call, or "". Includes calls out of order
  // where the driver notes them: forget_complaints() when the test meant them.
  virtual std::string finish() = 0;
  virtual void forget_complaints() = 0;

  // Whether nobody else uses the device's memory: then memory() is exact.
  virtual bool is_alone() const = 0;
};

// Null, with the reason in `why`, when this machine has no such device.
std::unique_ptr<ContractDevice> make_sim_contract_device(std::string& why);
std::unique_ptr<ContractDevice> make_cuda_contract_device(std::string& why);

}  // namespace gpumemx
