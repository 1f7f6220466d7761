// SPDX-License-Identifier: BSD-3-Clause
#include "replay/replay.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/check.hpp"

namespace gpumemx {

namespace {

// "No limit": as much as there are addresses. Far from it the allocator behaves the same for every
// capacity; a device that is only large enough for the trace would already make it careful.
constexpr Bytes kNoLimit = 64_TiB;

SimOptions device_options(const ReplayOptions& options) {
  SimOptions device;
  device.capacity = options.capacity == Bytes{} ? kNoLimit : options.capacity;
  device.check_hazards = false;  // a trace says nothing about accesses
  return device;
}

Options core_options(Options core) {
  core.background = true;
  return core;
}

}  // namespace

std::optional<std::string> ReplayOptions::validate() const {
  if (!(lag_ms >= 0 && lag_ms <= kMaxLagMs)) {
    return "the lag must be from 0 to 3600000 milliseconds (an hour)";
  }
  return core_options(core).validate();
}

Replay::Replay(const TraceView& trace, const ReplayOptions& options)
    : trace_(trace),
      device_(device_options(options)),
      allocator_(device_, core_options(options.core)),
      slots_(static_cast<std::size_t>(trace.slots)) {
  device_.set_lag_us(std::llround(options.lag_ms * 1000));
  if (trace.events() > 0) start_us_ = trace.time_us.front();
}

const StreamInfo& Replay::stream(std::int16_t index) {
  const auto i = static_cast<std::size_t>(index);
  if (i >= streams_.size()) streams_.resize(i + 1);
  if (!streams_[i]) streams_[i] = StreamInfo{device_.new_stream(), /*permanent=*/true};
  return *streams_[i];
}

bool Replay::step(std::size_t event) {
  const std::int64_t time = trace_.time_us[event] - start_us_;
  device_.advance_to(time + waited_us_);

  const std::int64_t op = trace_.op[event];
  const std::int16_t on = trace_.stream[event];
  const bool allocates = op >= 0;
  const auto index = static_cast<std::size_t>(allocates ? op : ~op);
  // The arrays may come from Python, where they can be written to after they were validated.
  GPUMEMX_CHECK(index < slots_.size() && slots_[index].live != allocates && on >= 0,
                "the trace was changed during its replay");
  Slot& slot = slots_[index];
  if (allocates) {
    AllocRequest request;
    request.size = {static_cast<std::uint64_t>(trace_.size[event])};
    request.stream = stream(on);
    const AllocResult block = allocator_.allocate(request);
    if (!block.ok()) return false;
    slot = {block.address, request.size, true};
    live_ += request.size;
    live_peak_ = std::max(live_peak_, live_);
  } else {
    allocator_.free(slot.address);
    live_ -= slot.size;
    slot.live = false;
  }
  {
    const CallerRoleScope background(CallerRole::kBackground);
    while (allocator_.maintain()) {
    }
  }
  waited_us_ = device_.now_us() - time;  // a request that waited moved the clock
  return true;
}

std::uint64_t Replay::run(std::uint64_t max_events) {
  const auto began = std::chrono::steady_clock::now();
  const std::size_t end = next_ + std::min<std::uint64_t>(max_events, trace_.events() - next_);
  while (next_ < end && !failed_) {
    if (step(next_)) {
      ++next_;
    } else {
      failed_ = true;
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  host_seconds_ += took.count();
  return next_;
}

Bytes Replay::reserved() const {
  return {static_cast<std::uint64_t>(allocator_.stats().reserved_bytes.all().current)};
}

ReplayReport Replay::report() const {
  const Stats stats = allocator_.stats();
  ReplayReport report;
  report.events = next_;
  report.live_peak = live_peak_;
  report.reserved_peak = {static_cast<std::uint64_t>(stats.reserved_bytes.all().peak)};
  report.driver = device_.meter();
  report.wait_seconds = static_cast<double>(device_.waited_us()) * 1e-6;
  if (next_ > 0) {
    report.trace_seconds = static_cast<double>(trace_.time_us[next_ - 1] - start_us_) * 1e-6;
    report.host_ns_per_event = host_seconds_ * 1e9 / static_cast<double>(next_);
  }
  report.failed_at = failed_at();
  report.paths = stats.paths;
  return report;
}

}  // namespace gpumemx
