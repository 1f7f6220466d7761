// SPDX-License-Identifier: BSD-3-Clause
//
// Why a request failed, in one cause and figures that add up to the byte:
//
//   device_total = reserved + others + device_free
//   reserved     = live + pending + held + idle_pending + idle_private + idle
//
// `others` is everything on the device that this allocator did not reserve: other processes, the
// context, libraries. When the device could not be asked, device_known is false and those three are 0.
#pragma once

#include <string>

#include "base/units.hpp"
#include "core/history.hpp"

namespace gpumemx {

enum class OomCause {
  kFull,              // live memory fills the device, or nearly: only freeing helps
  kFragmented,        // enough is cached, but on handles that something in use shares
  kCapped,            // the cap of this process, not the device
  kOtherUsers,        // others hold what this request would need
  kPendingOnStreams,  // freed memory that streams still use, and waiting was not allowed
  kHeldByPools,       // private pools hold what this request would need
  kNonsenseSize,      // more than the device has
  kDuringCapture,     // would have to wait or free, which a capture does not allow
  kDriverRefused,     // the device said no although it has enough free
  kShuttingDown,
};
const char* to_string(OomCause cause);

// Where the bytes are; see the equations above.
struct MemoryFigures {
  bool device_known = false;
  Bytes device_total;
  Bytes device_free;
  Bytes others;

  Bytes cap;  // ~0: none
  Bytes reserved;
  Bytes live;            // in blocks of the caller
  Bytes live_requested;  // what was asked for in them: the rest of `live` is rounding
  Bytes pending;         // freed, still used by recorded streams
  Bytes held;            // free parts of handles that are in use
  Bytes idle_pending;    // idle handles whose last use is not known complete
  Bytes idle_private;    // idle in private pools that are in use
  Bytes idle;            // idle handles that could be given back

  Bytes in_private_pools;  // of reserved, whatever its state
  Bytes largest_free;      // the largest free block that is ready, of any stream
};

struct OomVerdict : MemoryFigures {
  OomCause cause{};
  bool rejected = false;  // as AllocRequest::reject_above_cap asked for: not tried any further
  Bytes requested;        // as asked for
  Bytes block;            // rounded
  StreamRef stream;
  PoolId pool{};
  std::string driver_said;  // text of the last driver call that failed; may be empty

  // The figures and the cause, a sentence each. No advice: that depends on settings (monitor/).
  std::string text() const;
};

}  // namespace gpumemx
