// SPDX-License-Identifier: BSD-3-Clause
//
// What the allocator did, in order: a ring of events that costs one branch when it is off.
//
// Sizes are those that torch's traces carry: of blocks the bytes asked for, of segments the bytes
// mapped. The core reads no clock: whoever turns the history on may give it one.
#pragma once

#include <cstdint>
#include <memory>

#include "base/ring_buffer.hpp"
#include "base/units.hpp"

namespace gpumemx {

enum class PoolId : std::uint64_t {};  // 0 is the default pool
inline constexpr PoolId kDefaultPool{0};

enum class EventKind : std::uint8_t {
  kAlloc,
  kFreeRequested,  // by the caller
  kFreeCompleted,  // the block can be used again; the same moment unless streams were recorded on it
  kSegmentAlloc,   // a plain device allocation, after it exists
  kSegmentFree,    // before it goes
  kSegmentMap,     // memory came to stand at these addresses of a heap
  kSegmentUnmap,   // and left them
  kOutOfMemory,
};

struct HistoryEvent {
  EventKind kind;
  DeviceAddr address;  // kOutOfMemory: the device's free bytes
  Bytes size;
  StreamRef stream;
  PoolId pool{};
  std::uint64_t tag = 0;
  std::shared_ptr<const void> context;
  std::int64_t time = 0;  // what the clock said; 0 without one
};

class History {
 public:
  using Clock = std::int64_t (*)();

  bool on() const { return ring_.capacity() != 0; }
  // Starts empty with room for `capacity` events; 0 turns it off. Memory is taken now.
  void reset(std::size_t capacity, Clock clock) {
    ring_.reset(capacity);
    clock_ = clock;
  }
  // REQUIRES: on().
  void push(HistoryEvent event) {
    if (clock_ != nullptr) event.time = clock_();
    ring_.push(std::move(event));
  }
  const RingBuffer<HistoryEvent>& events() const { return ring_; }

 private:
  RingBuffer<HistoryEvent> ring_;
  Clock clock_ = nullptr;
};

}  // namespace gpumemx
