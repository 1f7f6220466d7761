// SPDX-License-Identifier: BSD-3-Clause
//
// The figures of one device. All that torch's DeviceStats has, by the same names, and how often each
// way of serving a request was taken. Equations that hold whenever the allocator's lock is free:
//
//   active_bytes   = allocated_bytes + blocks that recorded streams still use
//   reserved_bytes + returning_bytes = active_bytes + inactive_split_bytes + idle handles
//   small + large  = all, for every figure
//
// allocated and requested differ only by rounding to 512 B. inactive_split is what is cached but
// can't be given back, because something in use stands on the same handle. reserved_bytes counts
// a handle once, however many aliases it has.
//
// Peaks are exact as long as one thread at a time allocates and frees on the device, whichever thread and
// stream it is. While several do at once, the peaks of what blocks count (allocation, active, allocated,
// active and requested bytes) lie between the true peak and the sum of the streams' own peaks. current,
// allocated and freed are exact whatever threads do.
#pragma once

#include <array>
#include <cstdint>

#include "base/units.hpp"

namespace gpumemx {

struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;       // highest current since reset_peaks()
  std::int64_t allocated = 0;  // sum of all increases since reset_accumulated()

  // The sum of all decreases since then.
  std::int64_t freed() const { return allocated - (current - current_at_reset_); }
  void reset_accumulated() {
    allocated = 0;
    current_at_reset_ = current;
  }
  void add(std::int64_t n) {
    current += n;
    allocated += n;
    if (current > peak) peak = current;
  }
  void sub(std::int64_t n) { current -= n; }
  // A run of increases, together `got`, and decreases: `now` in all, at most `top` on the way.
  void add_run(std::int64_t now, std::int64_t top, std::int64_t got) {
    if (current + top > peak) peak = current + top;
    current += now;
    allocated += got;
  }

 private:
  std::int64_t current_at_reset_ = 0;
};

// One figure for all blocks, and apart for torch's small (up to 1 MiB) and large ones.
struct StatArray {
  enum Part { kAll, kSmall, kLarge };
  std::array<Stat, 3> part{};

  void add(bool small, std::uint64_t n) {
    part[kAll].add(static_cast<std::int64_t>(n));
    part[small ? kSmall : kLarge].add(static_cast<std::int64_t>(n));
  }
  void sub(bool small, std::uint64_t n) {
    part[kAll].sub(static_cast<std::int64_t>(n));
    part[small ? kSmall : kLarge].sub(static_cast<std::int64_t>(n));
  }
  // What counted as small counts as large from now on, or the other way round.
  void reclass(bool to_small, std::uint64_t n) {
    part[to_small ? kLarge : kSmall].sub(static_cast<std::int64_t>(n));
    part[to_small ? kSmall : kLarge].add(static_cast<std::int64_t>(n));
  }
  const Stat& all() const { return part[kAll]; }
  // For a copy: what counts as this at the moment, of one kind.
  void count_besides(Part kind, std::uint64_t n) {
    part[kAll].add(static_cast<std::int64_t>(n));
    part[kind].add(static_cast<std::int64_t>(n));
  }
  void reset_peaks() {
    for (Stat& s : part) s.peak = s.current;
  }
  void reset_accumulated() {
    for (Stat& s : part) s.reset_accumulated();
  }
};

// How often each way was taken, since the start.
struct PathCounts {
  std::uint64_t hits = 0;             // free memory that was ready
  std::uint64_t front_hits = 0;       // of them: blocks that were parked (front.hpp)
  std::uint64_t misses = 0;           // requests that needed more than that
  std::uint64_t holes = 0;            // misses served in a hole of the heap, not at its open end
  std::uint64_t created = 0;          // handles created
  std::uint64_t harvested_own = 0;    // handles moved within a stream
  std::uint64_t harvested_loose = 0;  // idle handles that stood nowhere
  std::uint64_t harvested_other = 0;  // handles taken from another stream
  std::uint64_t alias_switches = 0;   // dormant aliases used again: no driver call
  std::uint64_t repointed = 0;        // addresses whose old mapping had to go first
  std::uint64_t recut = 0;            // handles released to create a piece of another size
  std::uint64_t late_retired = 0;     // blocks that were pending on recorded streams
  std::uint64_t waits = 0;            // times a request waited for a stream
  std::uint64_t rollbacks = 0;        // misses undone after a driver call failed
  std::uint64_t callbacks = 0;        // times somebody was asked to free memory
  std::uint64_t private_blocks = 0;   // requests served in private pools
  std::uint64_t capture_blocks = 0;   // requests made while a capture was under way
  std::uint64_t plain_segments = 0;   // ordinary device allocations made
  std::uint64_t aliases_dropped = 0;  // dormant aliases unmapped
  std::uint64_t fences = 0;           // events recorded
  std::uint64_t rebacked = 0;         // handles created so that a block could be shared
  std::uint64_t disturbed = 0;        // times that was done under other blocks in use too
};

struct Stats {
  StatArray allocation, segment, active, inactive_split;  // counts
  StatArray allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;

  std::uint64_t num_alloc_retries = 0;  // times a failed request was tried again after freeing
  std::uint64_t num_ooms = 0;
  std::uint64_t num_oom_rejections = 0;    // AllocRequest::reject_above_cap; not among num_ooms
  std::uint64_t num_sync_all_streams = 0;  // always 0: nothing here waits for the whole device
  std::uint64_t num_device_alloc = 0;      // create and allocate calls that succeeded
  std::uint64_t num_device_free = 0;       // release and free calls

  PathCounts paths;
  std::uint64_t dormant_aliases = 0;
  Bytes returning_bytes;  // on their way back to the device; not in reserved_bytes any more

  // Calls visit(stat_array) for each of the arrays.
  template <class Visit>
  void for_each_array(Visit visit) {
    for (StatArray* a : {&allocation, &segment, &active, &inactive_split, &allocated_bytes,
                         &reserved_bytes, &active_bytes, &inactive_split_bytes, &requested_bytes}) {
      visit(*a);
    }
  }
  void reset_peaks() {
    for_each_array([](StatArray& a) { a.reset_peaks(); });
  }
  void reset_accumulated() {
    for_each_array([](StatArray& a) { a.reset_accumulated(); });
    num_alloc_retries = num_ooms = num_oom_rejections = num_sync_all_streams = num_device_alloc =
        num_device_free = 0;
  }
};

}  // namespace gpumemx
