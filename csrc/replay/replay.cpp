// SPDX-License-Identifier: BSD-3-Clause
#include "replay/replay.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/check.hpp"

namespace gpumemx {

Replay::Replay(const TraceView& trace, const ReplayOptions& options)
    : trace_(trace), model_(make_policy(options)), slots_(static_cast<std::size_t>(trace.slots)) {
  if (trace.events() > 0) start_us_ = trace.time_us.front();
}

bool Replay::step(std::size_t event) {
  model_->advance_to(trace_.time_us[event] - start_us_);

  const std::int64_t op = trace_.op[event];
  const std::int16_t on = trace_.stream[event];
  const bool allocates = op >= 0;
  const auto index = static_cast<std::size_t>(allocates ? op : ~op);
  // The arrays may come from Python, where they can be written to after they were validated.
  GPUMEMX_CHECK(index < slots_.size() && slots_[index].live != allocates && on >= 0,
                "the trace was changed during its replay");
  Slot& slot = slots_[index];
  if (allocates) {
    const Bytes size{static_cast<std::uint64_t>(trace_.size[event])};
    const std::optional<BlockRef> block = model_->allocate(size, on);
    if (!block) return false;
    slot = {*block, size, true};
    live_ += size;
    live_peak_ = std::max(live_peak_, live_);
  } else {
    model_->free(slot.block);
    live_ -= slot.size;
    slot.live = false;
  }
  model_->background();
  return true;
}

bool Replay::observe_segments(std::function<void(std::uint64_t, const SegmentEvent&)> observer) {
  return model_->observe_segments(
      [this, observer = std::move(observer)](const SegmentEvent& e) { observer(next_, e); });
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

ReplayReport Replay::report() const {
  const PolicyFigures figures = model_->figures();
  ReplayReport report;
  report.events = next_;
  report.live_peak = live_peak_;
  report.reserved_peak = figures.reserved_peak;
  report.driver = figures.driver;
  report.wait_seconds = figures.wait_seconds;
  if (next_ > 0) {
    report.trace_seconds = static_cast<double>(trace_.time_us[next_ - 1] - start_us_) * 1e-6;
    report.host_ns_per_event = host_seconds_ * 1e9 / static_cast<double>(next_);
  }
  report.failed_at = failed_at();
  report.retries = figures.retries;
  report.paths = figures.paths;
  return report;
}

}  // namespace gpumemx
