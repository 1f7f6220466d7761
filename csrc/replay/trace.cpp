// SPDX-License-Identifier: BSD-3-Clause
#include "replay/trace.hpp"

#include <vector>

namespace gpumemx {

namespace {

std::string at(std::size_t event) { return "event " + std::to_string(event) + ": "; }

std::string slot_text(std::int64_t slot) { return "slot " + std::to_string(slot); }

}  // namespace

std::optional<std::string> validate_trace(const TraceView& trace) {
  const std::size_t n = trace.events();
  if (trace.size.size() != n || trace.stream.size() != n || trace.time_us.size() != n) {
    return "the arrays have unequal lengths: op " + std::to_string(n) + ", size " +
           std::to_string(trace.size.size()) + ", stream " + std::to_string(trace.stream.size()) +
           ", time_us " + std::to_string(trace.time_us.size());
  }
  if (trace.slots < 0) {
    return "slots is " + std::to_string(trace.slots) + "; it must not be negative";
  }
  if (trace.slots > kMaxSlots) {
    return "slots is " + std::to_string(trace.slots) + "; at most " + std::to_string(kMaxSlots) +
           " are supported";
  }

  std::vector<bool> live(static_cast<std::size_t>(trace.slots));
  std::int64_t before = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const bool allocates = trace.op[i] >= 0;
    const std::int64_t slot = allocates ? trace.op[i] : ~trace.op[i];
    if (slot >= trace.slots) {
      return at(i) + slot_text(slot) + " is out of range; slots is " + std::to_string(trace.slots);
    }
    if (allocates && trace.size[i] < 0) {
      return at(i) + "size is " + std::to_string(trace.size[i]) + "; it must not be negative";
    }
    if (trace.stream[i] < 0) {
      return at(i) + "stream is " + std::to_string(trace.stream[i]) + "; it must not be negative";
    }
    const std::int64_t time = trace.time_us[i];
    if (time < 0 || time > kMaxTimeUs) {
      return at(i) + "time_us is " + std::to_string(time) + "; it must be from 0 to 2^53";
    }
    if (time < before) {
      return at(i) + "time_us goes back from " + std::to_string(before) + " to " +
             std::to_string(time);
    }
    before = time;

    const auto index = static_cast<std::size_t>(slot);
    if (allocates && live[index]) {
      return at(i) + slot_text(slot) + " is allocated again before it was freed";
    }
    if (!allocates && !live[index]) {
      return at(i) + slot_text(slot) + " is freed but not allocated";
    }
    live[index] = allocates;
  }
  return std::nullopt;
}

}  // namespace gpumemx
