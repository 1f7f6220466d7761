// SPDX-License-Identifier: BSD-3-Clause
//
// Counts driver calls, their bytes and their time, and tells apart who waited for them. The time is
// whatever the driver reports: modelled in the simulation, measured on a device (CountingDriver).
// What counts as growth is decided here, from the calls alone, so that no policy can flatter itself.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_set>

#include "driver/device_driver.hpp"

namespace gpumemx {

// Who makes the driver calls of this thread. The allocator's background work sets kBackground for
// its length; every other call is one that a thread of the program waits for.
enum class CallerRole { kInline, kBackground };

CallerRole caller_role();

class CallerRoleScope {
 public:
  explicit CallerRoleScope(CallerRole role);
  ~CallerRoleScope();
  CallerRoleScope(const CallerRoleScope&) = delete;
  CallerRoleScope& operator=(const CallerRoleScope&) = delete;

 private:
  CallerRole before_;
};

// seconds >= seconds_inline >= seconds_growth.
struct DriverFigures {
  std::array<std::uint64_t, kDriverCallKinds> calls{};  // successful and failed ones
  std::array<std::uint64_t, kDriverCallKinds> failures{};
  std::array<double, kDriverCallKinds> seconds_of{};  // by kind of call; together: seconds
  Bytes bytes_created;
  double seconds = 0;         // all driver time
  double seconds_inline = 0;  // of that: made by threads that allocate or free
  double seconds_growth = 0;  // of that: create, and the first map and set_access of a handle

  std::uint64_t count(DriverCall c) const { return calls[static_cast<std::size_t>(c)]; }
};

// Not thread-safe: its owner locks.
class DriverMeter {
 public:
  // One call of `call` that took `seconds`. `handle` is the handle that it concerns, where there is
  // one: the time of create(), and of map() and set_access() up to the first set_access(), is growth.
  void charge(DriverCall call, double seconds, bool ok, HandleId handle = {}, Bytes size = {});

  const DriverFigures& figures() const { return figures_; }

 private:
  DriverFigures figures_;
  std::unordered_set<std::uint64_t> fresh_;  // created, not yet accessible anywhere
};

}  // namespace gpumemx
