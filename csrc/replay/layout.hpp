// SPDX-License-Identifier: BSD-3-Clause
//
// What stood where at one event of a recorded run: segments and the blocks in them. Segments are
// those of the snapshot with the later events undone; blocks are those allocated up to the event
// whose free is not completed.
#pragma once

#include <cstdint>
#include <vector>

#include "replay/recorded_run.hpp"

namespace gpumemx {

struct LonelySegment {
  AddrRange range;
  std::int32_t block = 0;  // number in the run
};

// Bytes. All zero when the snapshot says nothing of segments, or something else than its events.
struct Layout {
  std::uint64_t reserved = 0;
  std::uint64_t live = 0;
  std::uint64_t largest_free = 0;           // in one piece
  std::uint64_t free_in_busy_segments = 0;  // what empty_cache() would not give back
  std::uint64_t free_in_private_pools = 0;  // of all that is free; serves only their own graph
  // Held by one block of an eighth of their size or less; those that waste most first.
  std::vector<LonelySegment> lonely;
};

// After event `event` of the run; -1: before the first. A block is taken to be as large as native
// makes it: its request, rounded up to 512 bytes.
Layout layout_at(const Snapshot& snapshot, const RecordedRun& run, std::int64_t event);

}  // namespace gpumemx
