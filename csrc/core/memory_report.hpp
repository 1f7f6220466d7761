// SPDX-License-Identifier: BSD-3-Clause
//
// Where a device's memory is, each part by its cause. All of one moment:
//
//   figures                see oom.hpp for what they add up to
//   sum of pending_on    = figures.pending
//   sum of waiting_on    = figures.idle_pending
//   held_by.all()        = figures.held + figures.idle_private
//   sum of pools         = figures.in_private_pools
#pragma once

#include <vector>

#include "base/units.hpp"
#include "core/history.hpp"
#include "core/oom.hpp"

namespace gpumemx {

struct StreamShare {
  StreamRef stream;
  Bytes bytes;
};

// What keeps unused memory from going back: what is in use on the same handle, or the pool.
struct HeldBy {
  Bytes live;     // beside blocks of the caller
  Bytes pending;  // beside freed blocks that streams still use, and nothing else
  Bytes pools;    // in private pools

  Bytes all() const { return live + pending + pools; }
};

struct PoolShare {
  PoolId pool{};
  int users = 0;  // 0: released, and not empty yet
  Bytes reserved;
  Bytes live;
};

struct MemoryReport {
  MemoryFigures figures;
  std::vector<StreamShare> pending_on;  // freed blocks, by a stream that still uses each
  std::vector<StreamShare> waiting_on;  // idle handles, by the stream that used each last
  HeldBy held_by;
  std::vector<PoolShare> pools;  // by number
  // What trim() would give back now, without waiting and with.
  Bytes releasable;
  Bytes releasable_by_waiting;
};

}  // namespace gpumemx
