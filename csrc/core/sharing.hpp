// SPDX-License-Identifier: BSD-3-Clause
//
// What other processes need to reach a block, and what this one needs of theirs.
//
// stock torch's receivers map n handles of one size side by side, so the handles under a shared block
// must all be of one size. A block rarely has that by itself: the last handle of a gap is cut to it.
// When it is first shared, the handles that do not fit are replaced by others, in place and with the
// same content (DeviceAllocator::share). plan_uniform() decides which, and by what.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "base/units.hpp"
#include "driver/device_driver.hpp"

namespace gpumemx {

struct SharedHandle {
  Bytes size;
  int descriptor = -1;  // the driver's: not to be closed
};

struct SharedRange {
  AddrRange range;                    // whole handles, all of the block in it
  std::vector<SharedHandle> handles;  // by address; none: `range` is one ordinary device allocation

  // Whether a receiver that knows one size only can map it.
  bool is_uniform() const {
    for (const SharedHandle& h : handles) {
      if (h.size != handles.front().size) return false;
    }
    return true;
  }
};

// A handle as another process exported it: a descriptor (the caller's), or a fabric handle.
struct ForeignHandle {
  Bytes size;
  std::variant<int, FabricHandle> handle;
};

// A handle under the block, in the order of addresses.
struct BackingPart {
  std::uint32_t pages = 0;
  bool fixed = false;        // another shared block stands on it: its memory may not be replaced
  bool has_others = false;   // other blocks in use stand on it, whose owners know nothing of this
  bool is_exported = false;  // costs nothing to export again
};

struct UniformPlan {
  std::uint32_t pages = 0;     // of every handle afterwards
  std::size_t keep_front = 0;  // parts that stay at either end;
  std::size_t keep_back = 0;   // those between are replaced
  std::uint64_t created = 0;   // by so many
  std::uint64_t extra = 0;     // pages that these reach beyond the last part
  bool disturbs_others = false;

  bool is_nothing() const { return created == 0; }
};

// How to get handles of one size under the parts: nothing to do where they are; else the cheapest in
// driver time and memory. `room`: pages behind the last part that are free to be mapped. Nothing when
// other shared blocks forbid it.
std::optional<UniformPlan> plan_uniform(const std::vector<BackingPart>& parts, std::uint64_t room);

}  // namespace gpumemx
