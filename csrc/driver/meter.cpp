// SPDX-License-Identifier: BSD-3-Clause
//
// The rule of growth, in one place: see DriverMeter::charge().
#include "driver/meter.hpp"

namespace gpumemx {

namespace {
thread_local CallerRole role_of_this_thread = CallerRole::kInline;
}  // namespace

CallerRole caller_role() { return role_of_this_thread; }

CallerRoleScope::CallerRoleScope(CallerRole role) : before_(role_of_this_thread) {
  role_of_this_thread = role;
}

CallerRoleScope::~CallerRoleScope() { role_of_this_thread = before_; }

void DriverMeter::charge(DriverCall call, double seconds, bool ok, HandleId handle, Bytes size) {
  const auto kind = static_cast<std::size_t>(call);
  ++figures_.calls[kind];
  if (!ok) ++figures_.failures[kind];

  // A create() that was refused grew nothing: its time is a plain cost of the policy that asked.
  const auto id = static_cast<std::uint64_t>(handle);
  bool is_growth = false;
  switch (call) {
    case DriverCall::kCreate:
      if (ok) {
        is_growth = true;
        figures_.bytes_created += size;
        fresh_.insert(id);
      }
      break;
    case DriverCall::kMap: is_growth = fresh_.contains(id); break;
    case DriverCall::kSetAccess:
      is_growth = ok ? fresh_.erase(id) != 0 : fresh_.contains(id);
      break;
    case DriverCall::kRelease:
      if (ok) fresh_.erase(id);
      break;
    default: break;
  }

  figures_.seconds += seconds;
  figures_.seconds_of[kind] += seconds;
  if (caller_role() != CallerRole::kInline) return;
  figures_.seconds_inline += seconds;
  if (is_growth) figures_.seconds_growth += seconds;
}

}  // namespace gpumemx
