// SPDX-License-Identifier: BSD-3-Clause
#include <gpumemx/memory.hpp>

#include "adapter/install.hpp"
#include "api/device.hpp"
#include "monitor/summary.hpp"

namespace gpumemx {

namespace {

Released trim(int device, Bytes target) {
  const adapter::DeviceView view = api::device_view(device);
  Released out;
  out.device = view.device();
  if (!view.started()) {
    out.text = "nothing to give back: nothing was allocated on this device";
    return out;
  }
  const TrimReport report = view.trim(target, /*wait=*/true);
  out.released = report.released.n;
  out.live = report.live.n;
  out.held = report.held.n;
  out.pending = report.pending.n;
  out.pools = report.pools.n;
  out.kept = report.wanted.n;
  out.text = describe(report);
  return out;
}

}  // namespace

MemoryInfo memory_info(int device) {
  const adapter::DeviceView view = api::device_view(device);
  const MemoryFigures f = view.figures();
  MemoryInfo info;
  info.device = view.device();
  info.allocator = "none";
  if (!view.started()) return info;
  info.allocator = adapter::is_installed_by_anyone() ? "gpumemx" : "torch";
  info.total = f.device_total.n;
  info.free = f.device_free.n;
  info.others = f.others.n;
  info.reserved = f.reserved.n;
  info.live = f.live.n;
  info.pending = f.pending.n;
  info.cached = f.idle.n + f.idle_pending.n;
  info.held = f.held.n + f.idle_private.n;
  info.largest_free = f.largest_free.n;
  if (f.cap.n != ~0ull) info.cap = f.cap.n;
  info.device_known = f.device_known;
  return info;
}

std::string memory_summary(int device) {
  std::string text = api::device_view(device).summary();
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

Released clear_cache(int device) { return trim(device, {}); }

Released trim_to(std::uint64_t bytes, int device) { return trim(device, {bytes}); }

}  // namespace gpumemx
