// SPDX-License-Identifier: BSD-3-Clause
//
// Feeds a recorded run to an allocator (policies.hpp), and says what it needed.
//
// The allocator sees one event at a time and nothing of what follows, so the figures after n events
// are those of a trace that ends there. What a thread beside the program would do is done after each
// event.
//
// Deterministic but for the host time. Not thread-safe: one thread at a time uses a Replay.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "replay/policies.hpp"
#include "replay/trace.hpp"

namespace gpumemx {

using ReplayOptions = PolicyOptions;

struct ReplayReport {
  std::uint64_t events = 0;      // done; the one that failed is not among them
  Bytes live_peak;               // highest sum of the sizes asked for: nothing can need less
  Bytes reserved_peak;           // highest device memory held
  DriverFigures driver;          // modelled
  double trace_seconds = 0;      // from the first to the last event done
  double wait_seconds = 0;       // that requests waited for streams
  double host_ns_per_event = 0;  // measured, of all our code: allocator, simulated device, replay
  std::optional<std::uint64_t> failed_at;  // index of the event that ran out of memory
  std::uint64_t retries = 0;               // requests that only cached memory given back served
  PathCounts paths;
};

class Replay {
 public:
  // Keeps the view: the trace's arrays must outlive the replay, unchanged.
  // REQUIRES: validate_trace(trace) and options.validate() find nothing.
  Replay(const TraceView& trace, const ReplayOptions& options);
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Called with the index of the event that caused it. Before the first run(). False when the policy
  // does not tell.
  bool observe_segments(std::function<void(std::uint64_t, const SegmentEvent&)> observer);

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
  Bytes live() const { return live_; }
  Bytes reserved() const { return model_->figures().reserved; }
  ReplayReport report() const;

 private:
  struct Slot {
    BlockRef block = 0;
    Bytes size;
    bool live = false;
  };

  bool step(std::size_t event);  // false when it ran out of memory

  const TraceView trace_;
  std::unique_ptr<PolicyModel> model_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
  bool failed_ = false;
  std::int64_t start_us_ = 0;  // the trace's time at the model's 0
  Bytes live_;
  Bytes live_peak_;
  double host_seconds_ = 0;
};

}  // namespace gpumemx
