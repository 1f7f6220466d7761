// SPDX-License-Identifier: BSD-3-Clause
#include "replay/recorded_run.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace gpumemx {

namespace {

// Live bytes of one device: 2^60, so that no sum overflows.
constexpr std::uint64_t kMaxLive = std::uint64_t{1} << 60;
// Where a file has no times: the mean of two recorded training runs.
constexpr std::int64_t kUsPerEvent = 100;
constexpr char kHowToRecord[] =
    "call torch.cuda.memory._record_memory_history() before the work that is to be looked at, then "
    "_dump_snapshot()";

bool is_segment_event(TraceAction action) {
  return action >= TraceAction::kSegmentAlloc && action <= TraceAction::kSegmentUnmap;
}
bool grows(TraceAction action) {
  return action == TraceAction::kSegmentAlloc || action == TraceAction::kSegmentMap;
}

// Puts the events of one device in order.
class RunBuilder {
 public:
  RunBuilder(const Snapshot& snapshot, int device) : snapshot_(snapshot) {
    run_.device = device;
    const auto index = static_cast<std::size_t>(device);
    if (index < snapshot.devices.size()) run_.entries = snapshot.devices[index];
  }

  Result<RecordedRun> build() {
    const SnapshotEntries& e = snapshot_.entries;
    const std::size_t first = run_.entries.first, count = run_.entries.count;
    frees_ = TraceAction::kFreeCompleted;
    for (std::size_t i = first; i < first + count; ++i) {
      if (e.action[i] == TraceAction::kFreeRequested) frees_ = TraceAction::kFreeRequested;
      if (e.time_us[i] >= 0) run_.has_times = true;
    }
    run_.change.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t row = first + i;
      if (e.action[row] == TraceAction::kAlloc) {
        run_.change[i] = add(row, false) + 1;
      } else if (e.action[row] == frees_) {
        run_.change[i] = -(free(row) + 1);
      }
    }
    take_state();
    if (!check_sums()) {
      return Error{Errc::kInvalidArgument,
                   {},
                   "the blocks of device " + std::to_string(run_.device) +
                       " add up to more than any device has: the file is damaged"};
    }
    std::sort(run_.baseline.begin(), run_.baseline.end(),
              [&](std::int32_t a, std::int32_t b) { return block(a).address < block(b).address; });
    tell_recording();
    return std::move(run_);
  }

 private:
  RecordedBlock& block(std::int32_t number) {
    return run_.blocks[static_cast<std::size_t>(number)];
  }

  std::int32_t add(std::size_t row, bool before) {
    const SnapshotEntries& e = snapshot_.entries;
    RecordedBlock made{e.addr[row],   e.size[row], e.stack[row],        e.metadata[row],
                       e.stream[row], before,      RecordedBlock::kNone};
    if (before) made.stack = made.metadata = 0;  // those of the free
    const auto number = static_cast<std::int32_t>(run_.blocks.size());
    if (before) {
      run_.baseline.push_back(number);
    } else {
      const auto [place, fresh] = live_.try_emplace(e.addr[row], number);
      if (!fresh) made.replaces = std::exchange(place->second, number);
    }
    run_.blocks.push_back(made);
    return number;
  }

  // The block that is freed, or kNone, whose change is 0.
  std::int32_t free(std::size_t row) {
    const std::uint64_t address = snapshot_.entries.addr[row];
    if (const auto found = live_.find(address); found != live_.end()) {
      const std::int32_t number = found->second;
      live_.erase(found);
      return number;
    }
    ++run_.unknown_frees;
    // Of an address that was in use and freed already, nothing can be from before.
    if (!touched_before(row)) return add(row, true);
    return RecordedBlock::kNone;
  }

  // Whether the address was allocated or freed by an earlier entry. Filled at its first use: in most
  // recordings every free is of a known block.
  bool touched_before(std::size_t row) {
    const SnapshotEntries& e = snapshot_.entries;
    for (; seen_ < row - run_.entries.first; ++seen_) {
      const std::size_t at = run_.entries.first + seen_;
      if (e.action[at] == TraceAction::kAlloc || e.action[at] == frees_)
        touched_.insert(e.addr[at]);
    }
    return touched_.contains(e.addr[row]);
  }

  // What the snapshot says of the device when it was taken.
  void take_state() {
    std::uint64_t reserved = 0;
    for (const SnapshotSegment& segment : snapshot_.segments) {
      if (segment.device != run_.device) continue;
      reserved += segment.size;
      for (const SnapshotBlock& b : snapshot_.blocks_of(segment)) {
        if (b.stack != 0) has_stacks_ = true;
        if (b.state != BlockState::kLive) continue;
        run_.live_now += b.requested;
        if (live_.contains(b.address)) continue;
        run_.baseline.push_back(static_cast<std::int32_t>(run_.blocks.size()));
        run_.blocks.push_back(
            {b.address, b.requested, b.stack, 0, segment.stream, true, RecordedBlock::kNone});
      }
    }
    if (!snapshot_.has_segments) {
      for (const auto& [address, number] : live_) run_.live_now += block(number).size;
      return;
    }
    run_.reserved_now = reserved;
    run_.reserved_before = reserved_before(reserved);
  }

  // Nothing when the segments and their events contradict each other: then some are not told.
  std::optional<std::uint64_t> reserved_before(std::uint64_t now) const {
    const SnapshotEntries& e = snapshot_.entries;
    std::uint64_t reserved = now;
    for (std::size_t i = run_.entries.count; i-- > 0;) {
      const std::size_t row = run_.entries.first + i;
      if (!is_segment_event(e.action[row])) continue;
      if (!grows(e.action[row])) {
        reserved += e.size[row];
        if (reserved > kMaxLive) return {};
      } else if (e.size[row] > reserved) {
        return {};
      } else {
        reserved -= e.size[row];
      }
    }
    return reserved;
  }

  bool check_sums() {
    std::uint64_t live = 0;
    const auto grow = [&](std::uint64_t by) {
      live += by;
      return live <= kMaxLive;
    };
    for (const std::int32_t number : run_.baseline) {
      if (!grow(block(number).size)) return false;
    }
    run_.baseline_bytes = live;
    for (const std::int32_t change : run_.change) {
      if (change > 0) {
        const RecordedBlock& b = block(change - 1);
        if (b.replaces != RecordedBlock::kNone) live -= block(b.replaces).size;
        if (!grow(b.size)) return false;
      } else if (change < 0) {
        live -= block(-change - 1).size;
      }
    }
    return run_.live_now <= kMaxLive;
  }

  void tell_recording() {
    const SnapshotEntries& e = snapshot_.entries;
    const std::size_t count = run_.entries.count;
    // With "state", torch records nothing but has a ring of one entry, which holds the last action.
    const bool one_of_a_ring =
        count == 1 &&
        (e.action[run_.entries.first] >= TraceAction::kSnapshot || run_.baseline_bytes > 0);
    if (count > 1 || (count == 1 && !one_of_a_ring)) {
      run_.state = Recording::kOn;
    } else {
      run_.state = has_stacks_ || count == 1 ? Recording::kStateOnly : Recording::kOff;
    }
    if (run_.state != Recording::kOn) return;
    if (snapshot_.overflowed) {
      run_.overflowed = *snapshot_.overflowed;
      return;
    }
    // Before torch said so, a full ring can be told by two things together: the events begin in the
    // middle of something, and their number is one that people choose for a ring.
    const bool round = count >= 1000 && (count % 1000 == 0 || std::has_single_bit(count));
    const bool in_the_middle = run_.baseline_bytes > 0 || run_.unknown_frees > 0 ||
                               run_.reserved_before.value_or(0) > 0 ||
                               e.action[run_.entries.first] == TraceAction::kFreeCompleted;
    run_.overflowed = round && in_the_middle;
  }

  const Snapshot& snapshot_;
  RecordedRun run_;
  TraceAction frees_ = TraceAction::kFreeRequested;
  std::unordered_map<std::uint64_t, std::int32_t> live_;  // by address
  std::unordered_set<std::uint64_t> touched_;
  std::size_t seen_ = 0;  // entries that are in touched_
  bool has_stacks_ = false;
};

}  // namespace

Result<std::vector<RecordedRun>> recorded_runs(const Snapshot& snapshot) {
  std::vector<bool> told(snapshot.devices.size());
  for (std::size_t d = 0; d < snapshot.devices.size(); ++d) {
    told[d] = snapshot.devices[d].count > 0;
  }
  for (const SnapshotSegment& segment : snapshot.segments) {
    const auto device = static_cast<std::size_t>(segment.device);
    if (device >= told.size()) told.resize(device + 1);
    told[device] = true;
  }
  std::vector<RecordedRun> runs;
  for (std::size_t d = 0; d < told.size(); ++d) {
    if (!told[d]) continue;
    auto run = RunBuilder(snapshot, static_cast<int>(d)).build();
    if (!run.ok()) return run.error();
    runs.push_back(std::move(run).take());
  }
  return runs;
}

Result<SnapshotTrace> to_trace(const Snapshot& snapshot, const RecordedRun& run) {
  const SnapshotEntries& e = snapshot.entries;
  SnapshotTrace trace;
  trace.device = run.device;
  std::vector<std::int64_t> slot_of(run.blocks.size(), -1);
  std::vector<std::int64_t> spare;
  std::vector<std::int16_t> stream_of(snapshot.streams.size(), -1);
  std::int16_t streams = 0;
  std::int64_t now = 0;
  std::optional<std::int64_t> start;

  const auto stream = [&](std::uint16_t index) {
    if (stream_of[index] < 0) stream_of[index] = streams++;
    return stream_of[index];
  };
  const auto push = [&](std::int64_t op, std::uint64_t size, std::uint16_t on) {
    trace.op.push_back(op);
    trace.size.push_back(static_cast<std::int64_t>(size));
    trace.stream.push_back(stream(on));
    trace.time_us.push_back(now);
  };
  const auto allocate = [&](std::int32_t number) {
    const RecordedBlock& block = run.blocks[static_cast<std::size_t>(number)];
    std::int64_t slot = trace.slots;
    if (spare.empty()) {
      ++trace.slots;
    } else {
      slot = spare.back();
      spare.pop_back();
    }
    slot_of[static_cast<std::size_t>(number)] = slot;
    push(slot, block.size, block.stream);
  };
  const auto release = [&](std::int32_t number, std::uint16_t on) {
    const auto index = static_cast<std::size_t>(number);
    push(~slot_of[index], run.blocks[index].size, on);
    spare.push_back(slot_of[index]);
  };

  for (const std::int32_t number : run.baseline) allocate(number);
  for (std::size_t i = 0; i < run.entries.count; ++i) {
    const std::size_t row = run.entries.first + i;
    if (!run.has_times) {
      now = static_cast<std::int64_t>(i) * kUsPerEvent;
    } else if (e.time_us[row] >= 0) {
      // Threads may take their times in another order than the allocator's lock.
      if (!start) start = e.time_us[row];
      now = std::max(now, e.time_us[row] - *start);
    }
    const std::int32_t change = run.change[i];
    if (change > 0) {
      const RecordedBlock& block = run.blocks[static_cast<std::size_t>(change - 1)];
      if (block.replaces != RecordedBlock::kNone) release(block.replaces, block.stream);
      allocate(change - 1);
    } else if (change < 0) {
      release(-change - 1, e.stream[row]);
    } else if (is_segment_event(e.action[row])) {
      trace.segments.push_back(
          {trace.op.size(), e.action[row], {{e.addr[row]}, {e.size[row]}}, stream(e.stream[row])});
    }
  }
  if (const auto mistake = validate_trace(trace.view())) {
    return Error{Errc::kInvalidArgument,
                 {},
                 "device " + std::to_string(run.device) + " cannot be replayed: " + *mistake};
  }
  return trace;
}

Result<std::vector<SnapshotTrace>> snapshot_traces(const Snapshot& snapshot) {
  auto runs = recorded_runs(snapshot);
  if (!runs.ok()) return runs.error();
  std::vector<SnapshotTrace> traces;
  bool state_only = false;
  for (const RecordedRun& run : runs.value()) {
    if (run.state == Recording::kStateOnly) state_only = true;
    if (run.state != Recording::kOn) continue;
    auto trace = to_trace(snapshot, run);
    if (!trace.ok()) return trace.error();
    traces.push_back(std::move(trace).take());
  }
  if (traces.empty()) {
    const std::string why = state_only
                                ? "no history: only the state was recorded (enabled=\"state\")"
                                : "no history: recording was off";
    return Error{Errc::kInvalidArgument, {}, why + "; " + kHowToRecord};
  }
  return traces;
}

}  // namespace gpumemx
