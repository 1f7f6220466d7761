// SPDX-License-Identifier: BSD-3-Clause
//
// Feeds a recorded run to the allocator over the simulated device, and says what it needed.
//
// The allocator sees one event at a time and nothing of what follows, so the figures after n events
// are those of a trace that ends there. The device's clock is the trace's time plus what requests
// have waited for streams so far. Work of a stream, and so an event on it, completes `lag_ms` after
// it was queued: the device runs that far behind the host. Streams live as long as the replay, as
// torch's do. The allocator's background work is done after each event, as the background's.
//
// Deterministic but for the host time. Not thread-safe: one thread at a time uses a Replay.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/allocator.hpp"
#include "driver/sim/sim_driver.hpp"
#include "replay/trace.hpp"

namespace gpumemx {

struct ReplayOptions {
  Bytes capacity;      // of the simulated device; 0: no limit
  double lag_ms = 20;  // 0 to kMaxLagMs
  Options core;        // `background` is set by the replay

  static constexpr double kMaxLagMs = 3.6e6;  // an hour

  // The first setting out of its range, in words, or nothing.
  std::optional<std::string> validate() const;
};

struct ReplayReport {
  std::uint64_t events = 0;      // done; the one that failed is not among them
  Bytes live_peak;               // highest sum of the sizes asked for: nothing can need less
  Bytes reserved_peak;           // highest device memory held
  DriverFigures driver;          // modelled
  double trace_seconds = 0;      // from the first to the last event done
  double wait_seconds = 0;       // that requests waited for streams
  double host_ns_per_event = 0;  // measured, of all our code: allocator, simulated device, replay
  std::optional<std::uint64_t> failed_at;  // index of the event that ran out of memory
  PathCounts paths;
};

class Replay {
 public:
  // Keeps the view: the trace's arrays must outlive the replay, unchanged.
  // REQUIRES: validate_trace(trace) and options.validate() find nothing.
  Replay(const TraceView& trace, const ReplayOptions& options);
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Does up to `max_events` more events, fewer at the end of the trace and at one that runs out of
  // memory, which ends the replay. Returns the events done, of all calls.
  std::uint64_t run(std::uint64_t max_events = UINT64_MAX);

  bool finished() const { return failed_ || next_ == trace_.events(); }
  std::optional<std::uint64_t> failed_at() const {
    return failed_ ? std::optional<std::uint64_t>(next_) : std::nullopt;
  }
  std::uint64_t events_done() const { return next_; }
  std::uint64_t events_total() const { return trace_.events(); }

  // After the events done so far.
  Bytes reserved() const;
  ReplayReport report() const;

 private:
  struct Slot {
    DeviceAddr address;
    Bytes size;
    bool live = false;
  };

  bool step(std::size_t event);  // false when it ran out of memory
  const StreamInfo& stream(std::int16_t index);

  const TraceView trace_;
  SimDriver device_;
  DeviceAllocator allocator_;
  std::vector<Slot> slots_;
  std::vector<std::optional<StreamInfo>> streams_;  // by the trace's index, made at first use
  std::size_t next_ = 0;
  bool failed_ = false;
  std::int64_t start_us_ = 0;  // the trace's time at the device's 0
  std::int64_t waited_us_ = 0;
  Bytes live_;
  Bytes live_peak_;
  double host_seconds_ = 0;
};

}  // namespace gpumemx
