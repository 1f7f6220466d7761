// SPDX-License-Identifier: BSD-3-Clause
//
// How to make one place ready for a block: which dormant aliases to use again, which old mappings to
// drop, and for each remaining gap where the memory comes from. A plan changes nothing; a plan that
// can't be completed costs only the looking. In this order for each gap:
//
//   1. create, while reserved stays within the budget (peak live and the slack);
//   2. an idle handle: the largest that fits, the one idle longest; of this heap set first, then one
//      that stands nowhere, then of other streams if their last use is known complete; else the
//      smallest that stands out over the gap by little;
//   3. re-cut: release the smallest idle handle, create the missing piece;
//   4. create beyond the budget, when the caller allows it.
#pragma once

#include <optional>
#include <vector>

#include "core/heap.hpp"
#include "core/placement.hpp"
#include "core/policy.hpp"

namespace gpumemx {

struct Piece {
  DeviceAddr at;
  std::uint32_t pages = 0;
  Handle* handle = nullptr;  // moved here; none: created
  Handle* victim = nullptr;  // released for it
};

struct MissPlan {
  Heap* heap = nullptr;
  DeviceAddr at;  // where the block will stand
  Bytes size;
  DeviceAddr fill_begin, fill_end;  // what has to be taken away from others meanwhile
  std::vector<Mapping*> switches;   // aliases that become homes
  std::vector<Mapping*> stale;      // mappings to drop first
  std::vector<Piece> pieces;        // by address
};

class MissPlanner {
 public:
  // `sets`: those whose idle handles may be taken, all of the default pool.
  MissPlanner(const std::vector<HeapSet*>& sets, HandlePool& handles)
      : sets_(sets), handles_(handles) {}

  // The plan for one candidate, or nothing.
  std::optional<MissPlan> plan(Heap& heap, const Candidate& candidate, Bytes size,
                               const Policy& policy, bool may_exceed_budget);

 private:
  // Sizes in pages: of the gap, and of the room from its begin when it may go on beyond the block.
  bool fill_gap(std::uint64_t gap, std::uint64_t room, Piece& piece);
  Handle* harvest(std::uint64_t gap, std::uint64_t room, bool any_overhang);
  Handle* idle_of_size(std::uint32_t pages, bool others);
  Handle* recut_victim();
  Handle* longest_idle(const IdleList& list, std::uint32_t pages);

  struct Cursor {
    const IdleList* list;
    std::uint32_t pages;
    Handle* next;
  };

  const std::vector<HeapSet*>& sets_;
  HandlePool& handles_;
  // Of the plan that is being made:
  const Policy* policy_ = nullptr;
  HeapSet* set_ = nullptr;
  HeapKind kind_{};
  Bytes size_;
  Bytes reserved_;  // as it will be
  bool may_exceed_budget_ = false;
  std::uint64_t mark_ = 0;  // on what the plan uses already
  std::vector<Cursor> cursors_;
};

}  // namespace gpumemx
