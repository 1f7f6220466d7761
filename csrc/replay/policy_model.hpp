// SPDX-License-Identifier: BSD-3-Clause
//
// What a replay asks of an allocator. Behind it stand gpumemx's own core and models of others. A
// further policy is one file with a class of this kind, and a line in the table of policies.cpp.
//
// A model sees one request at a time and nothing of what follows. It is deterministic: the same
// calls give the same figures on every machine. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>

#include "base/units.hpp"
#include "core/stats.hpp"
#include "driver/meter.hpp"

namespace gpumemx {

// What a block is given back by. What it means is the model's affair.
using BlockRef = std::uint64_t;

// What a policy may hold. 0: no limit.
struct MemoryLimits {
  Bytes cap;     // what it lets itself reserve, as set_per_process_memory_fraction() says it
  Bytes device;  // what the device has for it
  // What the device says it has: at least what both others allow. Decides how many addresses are
  // reserved; 0: that of the card that the models were measured on (an H200).
  Bytes device_total;

  // The lower of both, or 0.
  Bytes lowest() const {
    if (cap == Bytes{} || device == Bytes{}) return std::max(cap, device);
    return std::min(cap, device);
  }
};

struct PolicyFigures {
  Bytes reserved;           // device memory held now ...
  Bytes reserved_peak;      // ... and the most so far
  DriverFigures driver;     // modelled
  double wait_seconds = 0;  // that requests waited for streams
  std::uint64_t retries =
      0;  // requests that were served after cached memory went back to the device
  PathCounts paths;
};

// Memory taken from the device or given back: a segment, or pages of one. Addresses are the model's
// own, in the order that a device would have given.
struct SegmentEvent {
  bool taken;
  AddrRange range;
  std::int16_t stream;
};
using SegmentObserver = std::function<void(const SegmentEvent&)>;

class PolicyModel {
 public:
  virtual ~PolicyModel() = default;

  // The time of the trace, from its first event, never going back.
  virtual void advance_to(std::int64_t time_us) = 0;
  // `stream` counts from 0. Nothing when the device has no memory for it: the program's end, so no
  // further request follows.
  virtual std::optional<BlockRef> allocate(Bytes size, std::int16_t stream) = 0;
  virtual void free(BlockRef block) = 0;
  // After each event: what a thread beside the program would do.
  virtual void background() {}
  // Before the first request. False when the model does not tell: memory has no place in it.
  virtual bool observe_segments(SegmentObserver) { return false; }

  virtual PolicyFigures figures() const = 0;
};

}  // namespace gpumemx
