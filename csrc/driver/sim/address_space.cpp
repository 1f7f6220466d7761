// SPDX-License-Identifier: BSD-3-Clause
//
// First fit over an ordered map: a simulated device holds few free ranges of addresses.
#include "driver/sim/address_space.hpp"

namespace gpumemx {

AddressSpace::AddressSpace(AddrRange span) { free_.emplace(span.begin, span.size); }

std::optional<AddrRange> AddressSpace::take(Bytes size, Bytes alignment) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const AddrRange hole{it->first, it->second};
    const DeviceAddr begin{round_up({hole.begin.n}, alignment).n};
    if (begin >= hole.end() || hole.end() - begin < size) continue;
    const AddrRange taken{begin, size};
    free_.erase(it);
    if (hole.begin < begin) free_.emplace(hole.begin, begin - hole.begin);
    if (taken.end() < hole.end()) free_.emplace(taken.end(), hole.end() - taken.end());
    return taken;
  }
  return std::nullopt;
}

void AddressSpace::give_back(AddrRange range) {
  auto next = free_.lower_bound(range.begin);
  if (next != free_.end() && next->first == range.end()) {
    range.size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == range.begin) {
      before->second += range.size;
      return;
    }
  }
  free_.emplace(range.begin, range.size);
}

}  // namespace gpumemx
