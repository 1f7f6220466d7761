// SPDX-License-Identifier: BSD-3-Clause
#include "replay/gpumemx_model.hpp"

#include <cmath>

namespace gpumemx {

namespace {

// "No limit": as much as there are addresses. Far from it the allocator behaves the same for every
// capacity; a device that is only large enough for the trace would already make it careful.
constexpr Bytes kNoLimit = 64_TiB;

SimOptions device_options(Bytes capacity) {
  SimOptions device;
  device.capacity = capacity == Bytes{} ? kNoLimit : capacity;
  device.check_hazards = false;  // a trace says nothing about accesses
  return device;
}

}  // namespace

GpumemxModel::GpumemxModel(const Options& options, const MemoryLimits& limits, double lag_ms)
    : device_(device_options(limits.lowest())),
      allocator_(device_, options),
      background_(options.background) {
  device_.set_lag_us(std::llround(lag_ms * 1000));
}

const StreamInfo& GpumemxModel::stream(std::int16_t index) {
  const auto i = static_cast<std::size_t>(index);
  if (i >= streams_.size()) streams_.resize(i + 1);
  if (!streams_[i]) streams_[i] = StreamInfo{device_.new_stream(), /*permanent=*/true};
  return *streams_[i];
}

void GpumemxModel::advance_to(std::int64_t time_us) {
  time_us_ = time_us;
  device_.advance_to(time_us + waited_us_);
}

std::optional<BlockRef> GpumemxModel::allocate(Bytes size, std::int16_t on) {
  AllocRequest request;
  request.size = size;
  request.stream = stream(on);
  const AllocResult block = allocator_.allocate(request);
  if (!block.ok()) return std::nullopt;
  return block.address.n;
}

void GpumemxModel::free(BlockRef block) { allocator_.free(DeviceAddr{block}); }

void GpumemxModel::background() {
  if (background_) {
    const CallerRoleScope background(CallerRole::kBackground);
    while (allocator_.maintain()) {
    }
  }
  waited_us_ = device_.now_us() - time_us_;  // a request that waited moved the clock
}

PolicyFigures GpumemxModel::figures() const {
  const Stats stats = allocator_.stats();
  PolicyFigures figures;
  figures.reserved = {static_cast<std::uint64_t>(stats.reserved_bytes.all().current)};
  figures.reserved_peak = {static_cast<std::uint64_t>(stats.reserved_bytes.all().peak)};
  figures.driver = device_.meter();
  figures.wait_seconds = static_cast<double>(device_.waited_us()) * 1e-6;
  figures.paths = stats.paths;
  return figures;
}

}  // namespace gpumemx
