// SPDX-License-Identifier: BSD-3-Clause
//
// What a snapshot tells of one device, put in order: which recorded event allocates or frees which
// block, and what was there before the recording began.
//
// A block was there before when it is live in the snapshot without a recorded allocation, or when a
// recorded event frees what none allocated. Both sizes are known, so
//   (1) baseline + recorded allocations - recorded frees = live, at every event;
//   (2) at the end that is the requested bytes of the snapshot's live blocks, if nothing was lost.
// A free stands where the program freed (free_requested); only in a file that has none of these does
// free_completed count.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "replay/snapshot.hpp"
#include "replay/trace.hpp"

namespace gpumemx {

enum class Recording : std::uint8_t {
  kOn,         // events were recorded
  kOff,        // nothing was
  kStateOnly,  // no events, only where what is live was allocated
};

struct RecordedBlock {
  std::uint64_t address = 0;
  std::uint64_t size = 0;  // requested
  std::uint32_t stack = 0;
  std::uint32_t metadata = 0;
  std::uint16_t stream = 0;
  bool before = false;  // part of the baseline
  // The block that stood at the same address until this one was allocated: its free was not recorded.
  std::int32_t replaces = kNone;

  static constexpr std::int32_t kNone = -1;
};

struct RecordedRun {
  int device = 0;
  DeviceEntries entries;  // in the snapshot's columns
  Recording state = Recording::kOff;
  bool overflowed = false;  // the ring lost the oldest events
  std::uint64_t baseline_bytes = 0;
  std::uint64_t unknown_frees = 0;  // frees of what no recorded event allocated
  std::uint64_t live_now = 0;       // by the snapshot's blocks, else by its events
  std::optional<std::uint64_t> reserved_now;
  std::optional<std::uint64_t> reserved_before;  // when the recording began
  bool has_times = false;

  std::vector<RecordedBlock> blocks;   // those of the baseline come in the order of their discovery
  std::vector<std::int32_t> baseline;  // numbers of blocks, by address
  // By entry: n + 1 where it allocates block n, -(n + 1) where it frees it, else 0.
  std::vector<std::int32_t> change;
};

// The devices of the snapshot that it says anything of, by index. Fails: kInvalidArgument, when the
// live sizes add up to more than any device has.
Result<std::vector<RecordedRun>> recorded_runs(const Snapshot& snapshot);

// A segment as native got it from the device or gave it back.
struct SegmentEvent {
  std::size_t at = 0;  // index of the first event of the trace that comes after it
  TraceAction action = TraceAction::kSegmentAlloc;
  AddrRange range;
  std::int16_t stream = 0;
};

// A run as the replay takes it: the baseline first, all at time 0, then the events.
struct SnapshotTrace {
  int device = 0;
  std::vector<std::int64_t> op;
  std::vector<std::int64_t> size;
  std::vector<std::int16_t> stream;
  std::vector<std::int64_t> time_us;
  std::int64_t slots = 0;
  std::vector<SegmentEvent> segments;

  TraceView view() const { return {op, size, stream, time_us, slots}; }
};

// REQUIRES: `run` is of `snapshot`. Fails: kInvalidArgument, when the replay cannot hold it.
Result<SnapshotTrace> to_trace(const Snapshot& snapshot, const RecordedRun& run);

// The traces of all devices that have events. Fails: kInvalidArgument; also when there are none, with
// what to do to have some.
Result<std::vector<SnapshotTrace>> snapshot_traces(const Snapshot& snapshot);

}  // namespace gpumemx
