// SPDX-License-Identifier: BSD-3-Clause
//
// What a simulated device is told: its size and limits, and the work that a program queues on it.
#pragma once

#include <cstdint>

#include "base/units.hpp"
#include "driver/cost_model.hpp"

namespace gpumemx {

struct SimOptions {
  Bytes capacity = 1_TiB;        // device memory
  Bytes address_space = 64_TiB;  // what reserve() hands out of; at most 64 TiB
  Bytes granularity = 2_MiB;     // a power of two
  bool virtual_memory = true;    // false: plain mode, every virtual-memory call is kUnsupported
  bool exportable = true;
  std::uint64_t max_mappings = 524'090;  // set_access() past it fails, as measured (driver 580)
  bool check_hazards = true;             // false: no access is checked, time is still kept
  std::uint32_t device = 0;              // addresses of two devices never overlap
  std::uint32_t devices = 1;             // of the machine: the others can be peers
  CostModel costs;
};

// One range that a piece of work touches. A write leaves `tag` in every 512 B granule that the
// range touches; a read requires every granule to hold `tag`. Tag 0 means "undefined": what new
// memory holds and no read accepts.
struct Access {
  AddrRange range;
  bool write = false;
  std::uint64_t tag = 0;
};

inline Access reads(AddrRange range, std::uint64_t tag) { return {range, false, tag}; }
inline Access writes(AddrRange range, std::uint64_t tag) { return {range, true, tag}; }

enum class GraphId : std::uint64_t {};  // a captured graph; 0 is none

}  // namespace gpumemx
