// SPDX-License-Identifier: BSD-3-Clause
//
// The words of a hazard.
#include "driver/sim/hazards.hpp"

#include <cstdio>

namespace gpumemx {

std::string describe(DeviceAddr address) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address.n));
  return text;
}

std::string describe(AddrRange range) {
  char text[56];
  std::snprintf(text, sizeof text, "[0x%llx, +%llu)",
                static_cast<unsigned long long>(range.begin.n),
                static_cast<unsigned long long>(range.size.n));
  return text;
}

std::string describe(StreamId stream) {
  return "stream " + std::to_string(static_cast<std::uint64_t>(stream));
}

std::string describe(std::uint64_t serial, StreamId stream, const Access& access) {
  return std::string(access.write ? "write #" : "read #") + std::to_string(serial) + " on " +
         describe(stream) + " of " + describe(access.range) + " tag " + std::to_string(access.tag);
}

std::string describe(const PastCall& call) {
  std::string text = std::string(to_string(call.call)) + " #" + std::to_string(call.serial);
  if (call.range.begin.n != 0 || call.range.size.n != 0) text += " of " + describe(call.range);
  if (call.handle != HandleId{}) {
    text += " handle " + std::to_string(static_cast<std::uint64_t>(call.handle));
  }
  return text;
}

void HazardLog::add(std::string text) {
  ++count_;
  if (texts_.size() < kKept) texts_.push_back(std::move(text));
}

void HazardLog::clear() {
  texts_.clear();
  count_ = 0;
}

void CallHistory::add(const PastCall& call) {
  if (ring_.size() < kKept) {
    ring_.push_back(call);
    return;
  }
  ring_[next_] = call;
  next_ = (next_ + 1) % kKept;
}

template <class Match>
std::string CallHistory::newest(Match match) const {
  const PastCall* found = nullptr;
  for (const PastCall& call : ring_) {
    if (match(call) && (found == nullptr || found->serial < call.serial)) found = &call;
  }
  return found == nullptr ? "" : ", ended by " + describe(*found);
}

std::string CallHistory::last_over(AddrRange range) const {
  return newest([&](const PastCall& call) { return call.range.overlaps(range); });
}

std::string CallHistory::last_of(HandleId handle) const {
  return newest([&](const PastCall& call) {
    return call.handle == handle && call.call == DriverCall::kRelease;
  });
}

}  // namespace gpumemx
