// SPDX-License-Identifier: BSD-3-Clause
#include "monitor/scope.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/text.hpp"

namespace gpumemx {

namespace {

std::uint64_t memory_calls(const DriverFigures& f) {
  std::uint64_t n = 0;
  for (const DriverCall call :
       {DriverCall::kCreate, DriverCall::kRelease, DriverCall::kMap, DriverCall::kSetAccess,
        DriverCall::kUnmap, DriverCall::kAllocate, DriverCall::kFree}) {
    n += f.count(call);
  }
  return n;
}

}  // namespace

struct ScopeBoard::Open {
  ScopeFigures figures;
  DriverFigures driver_before;
  std::int64_t allocations_before = 0;
};

void ScopeBoard::settle() {
  const Bytes peak = allocator_.take_interval_peak();
  whole_peak_ = std::max(whole_peak_, peak);
  for (Open* scope : open_) scope->figures.peak = std::max(scope->figures.peak, peak);
}

ScopeBoard::Open* ScopeBoard::begin(bool from_start) {
  MutexLock lock(mu_);
  auto* scope = new Open;
  settle();
  if (from_start) {
    scope->figures.peak = whole_peak_;
    open_.push_back(scope);
    return scope;
  }
  const Stats stats = allocator_.stats();
  scope->figures.before = scope->figures.after =
      scope->figures.peak = {static_cast<std::uint64_t>(stats.allocated_bytes.all().current)};
  scope->allocations_before = stats.allocation.all().allocated;
  scope->driver_before = driver_.figures();
  open_.push_back(scope);
  return scope;
}

ScopeFigures ScopeBoard::read(Open* scope) {
  MutexLock lock(mu_);
  settle();
  const Stats stats = allocator_.stats();
  const DriverFigures now = driver_.figures();
  ScopeFigures& f = scope->figures;
  f.after = {static_cast<std::uint64_t>(stats.allocated_bytes.all().current)};
  // Less than before when somebody reset the accumulated statistics inside the scope.
  f.allocations = static_cast<std::uint64_t>(
      std::max<std::int64_t>(0, stats.allocation.all().allocated - scope->allocations_before));
  f.driver_calls = memory_calls(now) - memory_calls(scope->driver_before);
  f.driver_seconds = now.seconds - scope->driver_before.seconds;
  return f;
}

ScopeFigures ScopeBoard::end(Open* scope) {
  const ScopeFigures figures = read(scope);
  MutexLock lock(mu_);
  std::erase(open_, scope);
  delete scope;
  return figures;
}

std::string describe_memory(const std::string& name, const ScopeFigures& f) {
  const std::int64_t delta = f.delta();
  const Bytes kept{static_cast<std::uint64_t>(delta < 0 ? -delta : delta)};
  return name + ": peak " + format_bytes(f.peak) + ", kept " + (delta < 0 ? "-" : "+") +
         format_bytes(kept);
}

std::string describe(const std::string& name, const ScopeFigures& f) {
  std::array<char, 64> calls{};
  std::snprintf(calls.data(), calls.size(), "%llu driver calls in %.1f ms",
                static_cast<unsigned long long>(f.driver_calls), f.driver_seconds * 1e3);
  return describe_memory(name, f) + ", " + calls.data();
}

}  // namespace gpumemx
