// SPDX-License-Identifier: BSD-3-Clause
#include <gpumemx/memory.hpp>

#include "adapter/install.hpp"
#include "api/device.hpp"
#include "monitor/summary.hpp"

namespace gpumemx {

namespace {

Released trim(int device, Bytes target, bool wait) {
  const adapter::DeviceView view = api::device_view(device);
  Released out;
  out.device = view.device();
  if (!view.started()) {
    out.text = "nothing to give back: nothing was allocated on this device";
    return out;
  }
  const TrimReport report = view.trim(target, wait);
  out.predicted = report.predicted.n;
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
  const adapter::DeviceReport report = view.report();
  const MemoryReport& m = report.memory;
  const MemoryFigures& f = m.figures;
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
  info.requested = f.live_requested.n;
  if (report.workspaces) info.workspaces = report.workspaces->n;
  info.waiting = f.idle_pending.n;
  info.held_by_live = m.held_by.live.n;
  info.held_by_pending = m.held_by.pending.n;
  info.held_by_pools = m.held_by.pools.n;
  for (std::size_t i = 0; i < m.pools.size(); ++i) {
    const PoolShare& pool = m.pools[i];
    info.pools.push_back({report.pool_names[i], pool.users > 0, pool.reserved.n, pool.live.n});
  }
  info.in_pools = f.in_private_pools.n;
  info.releasable = m.releasable.n;
  info.releasable_by_waiting = m.releasable_by_waiting.n;
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

Released clear_cache(int device, bool wait) { return trim(device, {}, wait); }

Released trim_to(std::uint64_t bytes, int device, bool wait) { return trim(device, {bytes}, wait); }

}  // namespace gpumemx
