// SPDX-License-Identifier: BSD-3-Clause
#include "core/oom.hpp"

#include "base/text.hpp"

namespace gpumemx {

const char* to_string(OomCause cause) {
  switch (cause) {
    case OomCause::kFull: return "full";
    case OomCause::kFragmented: return "fragmented";
    case OomCause::kCapped: return "capped";
    case OomCause::kOtherUsers: return "other users";
    case OomCause::kPendingOnStreams: return "pending on streams";
    case OomCause::kHeldByPools: return "held by pools";
    case OomCause::kNonsenseSize: return "nonsense size";
    case OomCause::kDuringCapture: return "during a capture";
    case OomCause::kDriverRefused: return "refused by the driver";
    case OomCause::kShuttingDown: return "shutting down";
  }
  return "unknown";
}

namespace {

std::string why(const OomVerdict& v) {
  switch (v.cause) {
    case OomCause::kFull: return "The memory in use fills the device; only freeing helps.";
    case OomCause::kFragmented:
      return format_bytes(v.held) +
             " is free on handles that something in use shares; the largest "
             "free block is " +
             format_bytes(v.largest_free) + ".";
    case OomCause::kCapped:
      return "The cap of " + format_bytes(v.cap) + " for this process is reached; the device has " +
             format_bytes(v.device_free) + " free.";
    case OomCause::kOtherUsers: return "Others hold " + format_bytes(v.others) + " of the device.";
    case OomCause::kPendingOnStreams:
      return format_bytes(v.pending + v.idle_pending) + " was freed but is still used by streams.";
    case OomCause::kHeldByPools:
      return "Private pools hold " + format_bytes(v.in_private_pools) + ".";
    case OomCause::kNonsenseSize:
      return "That is more than the device has; the size was probably computed wrongly.";
    case OomCause::kDuringCapture:
      return "Memory could be had by waiting or freeing, which a capture under way does not allow.";
    case OomCause::kDriverRefused:
      return "The driver refused although " + format_bytes(v.device_free) + " is free.";
    case OomCause::kShuttingDown: return "The driver is shutting down.";
  }
  return "";
}

}  // namespace

std::string OomVerdict::text() const {
  std::string out = "Tried to allocate " + format_bytes(requested) + ". " + why(*this);
  if (device_known) {
    out += " Device " + format_bytes(device_total) + ": " + format_bytes(reserved) +
           " reserved here, " + format_bytes(others) + " by others, " + format_bytes(device_free) +
           " free.";
  }
  out += " Reserved " + format_bytes(reserved) + ": " + format_bytes(live) + " live, " +
         format_bytes(pending) + " pending, " + format_bytes(held) + " held, " +
         format_bytes(idle_pending + idle_private + idle) + " idle (" + format_bytes(idle_pending) +
         " of it not yet complete, " + format_bytes(idle_private) + " in private pools).";
  if (!driver_said.empty()) out += " The driver said: " + driver_said + ".";
  return out;
}

}  // namespace gpumemx
