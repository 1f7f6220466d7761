// SPDX-License-Identifier: BSD-3-Clause
//
// Several simulated devices of one machine: independent of each other, their addresses disjoint.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "driver/sim/sim_driver.hpp"

namespace gpumemx {

class SimMachine {
 public:
  explicit SimMachine(std::uint32_t devices, SimOptions options = {}) {
    options.devices = devices;
    for (options.device = 0; options.device < devices; ++options.device) {
      devices_.push_back(std::make_unique<SimDriver>(options));
    }
  }

  std::size_t size() const { return devices_.size(); }
  SimDriver& device(std::size_t index) { return *devices_[index]; }  // REQUIRES: index < size()

 private:
  std::vector<std::unique_ptr<SimDriver>> devices_;
};

}  // namespace gpumemx
