// SPDX-License-Identifier: BSD-3-Clause
//
// Which driver calls of a simulated device fail. A test runs one scenario with the first, second,
// third ... call failing until none does, and so walks every error path.
// Not thread-safe: owned by SimDriver, used under its mutex.
#pragma once

#include <array>
#include <cstdint>

#include "driver/device_driver.hpp"

namespace gpumemx {

class Faults {
 public:
  // Each counts from now, n >= 1; the call fails once. n = 0 takes the wish back.
  void fail_nth(DriverCall call, std::uint64_t n);
  void fail_nth_any(std::uint64_t n);  // counts the calls that callers have an error path for
  void fail_always(DriverCall call);
  void clear();  // no more failures; fired() stays
  std::uint64_t fired() const { return fired_; }

  // Whether this call is to fail. To be asked exactly once a call.
  bool strikes(DriverCall call) { return is_armed_ && count(call); }

 private:
  bool count(DriverCall call);

  std::array<std::uint64_t, kDriverCallKinds> left_{};  // until failure; 0: no failure is due
  std::array<bool, kDriverCallKinds> always_{};
  std::uint64_t any_left_ = 0;
  std::uint64_t fired_ = 0;
  bool is_armed_ = false;
};

}  // namespace gpumemx
