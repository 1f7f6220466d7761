// SPDX-License-Identifier: BSD-3-Clause
//
// Hands out ranges of a span of addresses, always the lowest that fits: the same program gets the
// same addresses in every run, and what was given back is reused at once, so that a stale use of it
// meets somebody else's memory instead of nothing.
//
// Invariant: the free ranges are disjoint and no two touch. Not thread-safe.
#pragma once

#include <map>
#include <optional>

#include "base/units.hpp"

namespace gpumemx {

class AddressSpace {
 public:
  explicit AddressSpace(AddrRange span);

  // REQUIRES: size is positive, alignment a power of two.
  std::optional<AddrRange> take(Bytes size, Bytes alignment);
  void give_back(AddrRange range);  // REQUIRES: a whole take() result, not given back before

 private:
  std::map<DeviceAddr, Bytes> free_;
};

}  // namespace gpumemx
