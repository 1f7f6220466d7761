// SPDX-License-Identifier: BSD-3-Clause
//
// Where cudaMalloc places what it gives. Only the order of the addresses matters: torch's allocator
// takes the lowest of equally large free blocks. As seen on one H200 (driver 580) in recorded runs:
// addresses come in chunks of whole 32 MiB, each below the last; what a chunk has left over serves
// later requests, the lowest place that fits first.
#pragma once

#include <cstdint>
#include <map>

#include "base/units.hpp"

namespace gpumemx {

class DeviceAddresses {
 public:
  static constexpr Bytes kChunk = 32_MiB;

  DeviceAddr allocate(Bytes size);  // REQUIRES: above 0 and a multiple of 2 MiB
  void free(AddrRange range);       // REQUIRES: as allocate() gave it

 private:
  using Ranges = std::map<std::uint64_t, std::uint64_t>;  // begin to size

  static void add(Ranges& ranges, std::uint64_t begin, std::uint64_t size);

  std::uint64_t bottom_ = std::uint64_t{1} << 47;
  Ranges chunks_;
  Ranges left_over_;  // of chunks that hold something
  Ranges gaps_;       // between chunks
};

}  // namespace gpumemx
