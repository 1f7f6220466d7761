// SPDX-License-Identifier: BSD-3-Clause
#include "replay/device_addresses.hpp"

#include <algorithm>
#include <iterator>

namespace gpumemx {

void DeviceAddresses::add(Ranges& ranges, std::uint64_t begin, std::uint64_t size) {
  auto next = ranges.lower_bound(begin);
  if (next != ranges.end() && next->first == begin + size) {
    size += next->second;
    next = ranges.erase(next);
  }
  if (next != ranges.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += size;
      return;
    }
  }
  ranges.emplace(begin, size);
}

DeviceAddr DeviceAddresses::allocate(Bytes size) {
  const auto fits = [&](const auto& range) { return range.second >= size.n; };
  const auto place = std::find_if(left_over_.begin(), left_over_.end(), fits);
  if (place != left_over_.end()) {
    const auto [begin, room] = *place;
    left_over_.erase(place);
    if (room > size.n) left_over_.emplace(begin + size.n, room - size.n);
    return {begin};
  }
  const std::uint64_t whole = round_up(size, kChunk).n;
  // The highest gap, at its upper end.
  const auto gap = std::find_if(gaps_.rbegin(), gaps_.rend(),
                                [&](const auto& range) { return range.second >= whole; });
  std::uint64_t begin = 0;
  if (gap != gaps_.rend()) {
    gap->second -= whole;
    begin = gap->first + gap->second;
    if (gap->second == 0) gaps_.erase(gap->first);
  } else {
    bottom_ -= whole;
    begin = bottom_;
  }
  chunks_.emplace(begin, whole);
  if (whole > size.n) left_over_.emplace(begin + size.n, whole - size.n);
  return {begin};
}

void DeviceAddresses::free(AddrRange range) {
  const auto chunk = std::prev(chunks_.upper_bound(range.begin.n));
  // Ranges of two chunks that meet are not one.
  auto [begin, size] = std::pair(range.begin.n, range.size.n);
  const auto after = left_over_.find(begin + size);
  if (after != left_over_.end() && after->first < chunk->first + chunk->second) {
    size += after->second;
    left_over_.erase(after);
  }
  auto before = left_over_.lower_bound(begin);
  if (before != left_over_.begin()) {
    before = std::prev(before);
    if (before->first >= chunk->first && before->first + before->second == begin) {
      size += before->second;
      begin = before->first;
      left_over_.erase(before);
    }
  }
  if (size < chunk->second) {
    left_over_.emplace(begin, size);
    return;
  }
  add(gaps_, chunk->first, chunk->second);
  chunks_.erase(chunk);
}

}  // namespace gpumemx
