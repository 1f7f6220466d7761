// SPDX-License-Identifier: BSD-3-Clause
//
// Counting calls down to their failure.
#include "driver/sim/faults.hpp"

namespace gpumemx {

namespace {

std::size_t index(DriverCall call) { return static_cast<std::size_t>(call); }

// Not unreserve, export, import, wait, synchronize and copy: only a broken driver fails them, and
// fail_nth() can.
bool counts_as_any(DriverCall call) {
  switch (call) {
    case DriverCall::kReserve:
    case DriverCall::kCreate:
    case DriverCall::kRelease:
    case DriverCall::kMap:
    case DriverCall::kSetAccess:
    case DriverCall::kUnmap:
    case DriverCall::kAllocate:
    case DriverCall::kFree:
    case DriverCall::kRecord:
    case DriverCall::kQuery:
    case DriverCall::kMemory: return true;
    default: return false;
  }
}

// True at the call that brings the count to zero.
bool count_down(std::uint64_t& left) { return left != 0 && --left == 0; }

}  // namespace

void Faults::fail_nth(DriverCall call, std::uint64_t n) {
  left_[index(call)] = n;
  is_armed_ = true;
}

void Faults::fail_nth_any(std::uint64_t n) {
  any_left_ = n;
  is_armed_ = true;
}

void Faults::fail_always(DriverCall call) {
  always_[index(call)] = true;
  is_armed_ = true;
}

void Faults::clear() {
  left_ = {};
  always_ = {};
  any_left_ = 0;
  is_armed_ = false;
}

bool Faults::count(DriverCall call) {
  const bool by_kind = count_down(left_[index(call)]);
  const bool by_any = counts_as_any(call) && count_down(any_left_);
  if (!by_kind && !by_any && !always_[index(call)]) return false;
  ++fired_;
  return true;
}

}  // namespace gpumemx
