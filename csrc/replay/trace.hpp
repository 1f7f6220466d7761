// SPDX-License-Identifier: BSD-3-Clause
//
// A recorded run: one event an allocation or a free, in the order of the program.
//
// op[i] >= 0 allocates size[i] bytes on stream[i] into slot op[i]; op[i] < 0 frees slot ~op[i], and
// its size is not looked at. time_us[i] counts from the first event. A slot holds one block at a
// time. Frees stand where the program freed, so later events of the stream may reuse the memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace gpumemx {

// Borrowed: the arrays must outlive every user of the view, unchanged.
struct TraceView {
  std::span<const std::int64_t> op;
  std::span<const std::int64_t> size;
  std::span<const std::int16_t> stream;
  std::span<const std::int64_t> time_us;
  std::int64_t slots = 0;

  std::size_t events() const { return op.size(); }
};

// Blocks that may be live at once in a trace. Far above any recording, and low enough that a broken
// file cannot take the machine's memory.
inline constexpr std::int64_t kMaxSlots = 1 << 24;
// 285 years, so that no sum of times overflows.
inline constexpr std::int64_t kMaxTimeUs = std::int64_t{1} << 53;

// The first mistake of the trace in one sentence with the event's index and the value, or nothing.
// O(events + slots).
std::optional<std::string> validate_trace(const TraceView& trace);

}  // namespace gpumemx
