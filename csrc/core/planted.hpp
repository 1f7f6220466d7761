// SPDX-License-Identifier: BSD-3-Clause
//
// Faults that the tests plant in the core to prove that the random programs would catch them. They
// exist only in the test-only build gpumemx_core_planted; in the library planted() is a constant
// false and the code behind it disappears.
#pragma once

namespace gpumemx {

enum class Fault {
  kNone,
  kEventSkipped,          // an epoch counts as done although its event was not reached
  kEpochKeptOpen,         // an event covers frees that come after it was recorded
  kRepointEarly,          // an address is re-pointed before its last use is complete
  kPendingReused,         // a block that another stream still uses is free at once
  kHandleIdleWhileBusy,   // a handle goes to the idle list while a block stands on it
  kOtherStreamUnchecked,  // a handle moves to another stream before its last use is complete
  kPrivateMerelyOrdered,  // a private pool takes memory that is only ordered on its stream
  kSwitchBusyAlias,       // an alias becomes the standing place of a handle that is in use
  kRollbackForgets,       // a mapping that failed half-way stays
  kReleaseEarly,          // trimming releases memory that running work still uses
  kCaptureNotRelaxed,     // events are queried in the thread's own capture mode
  kPrivateHarvested,      // handles of a private pool can be harvested
  kPoolDissolvedEarly,    // a released pool's memory moves on before running graphs are done
  kLockNotTaken,          // a free changes the books without the lock
  kRemainderOverlaps,     // the remainder of a split begins inside the block
};

#ifdef GPUMEMX_PLANTED_FAULTS
extern Fault planted_fault;
inline bool planted(Fault fault) { return planted_fault == fault; }
#else
constexpr bool planted(Fault) { return false; }
#endif

}  // namespace gpumemx
