// SPDX-License-Identifier: BSD-3-Clause
//
// What the simulation found wrong with a program, in words that name both operations, and the short
// memory of past calls that this takes ("unmapped by unmap #9").
//
// Every driver call and every piece of work has a serial number (#9), counted over the device.
// Not thread-safe: owned by SimDriver, used under its mutex.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "driver/device_driver.hpp"
#include "driver/sim/sim_options.hpp"

namespace gpumemx {

std::string describe(DeviceAddr address);
std::string describe(AddrRange range);  // "[0x100000200000, +512)"
std::string describe(StreamId stream);  // "stream 3"

// "write #7 on stream 3 of [0x100000200000, +512) tag 5"
std::string describe(std::uint64_t serial, StreamId stream, const Access& access);

// A call and what it was about: a range, a handle, or both.
struct PastCall {
  DriverCall call;
  std::uint64_t serial;
  AddrRange range;
  HandleId handle{};
};
std::string describe(const PastCall& call);  // "map #4 of [0x100000200000, +2097152) handle 2"

class HazardLog {
 public:
  static constexpr std::size_t kKept = 100;

  void add(std::string text);
  void clear();
  const std::vector<std::string>& texts() const { return texts_; }  // the first kKept
  std::uint64_t count() const { return count_; }

 private:
  std::vector<std::string> texts_;
  std::uint64_t count_ = 0;
};

// The last calls that ended something. Bounded: a text can lack its second half when the other
// operation is thousands of calls back.
class CallHistory {
 public:
  static constexpr std::size_t kKept = 8192;

  void add(const PastCall& call);
  // ", unmapped by ..." for the newest such call, or nothing: to be appended to a text.
  std::string last_over(AddrRange range) const;
  std::string last_of(HandleId handle) const;

 private:
  template <class Match>
  std::string newest(Match match) const;

  std::vector<PastCall> ring_;
  std::size_t next_ = 0;
};

}  // namespace gpumemx
