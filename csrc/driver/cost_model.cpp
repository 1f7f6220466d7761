// SPDX-License-Identifier: BSD-3-Clause
//
// The measured table, and how it is turned into the cost of one handle.
#include "driver/cost_model.hpp"

namespace gpumemx {

namespace {

// As measured: microseconds a GiB with handles of `mib`, and two columns timed a handle. map and
// set_access were timed together a handle; their shares are those of the columns a GiB.
struct Measured {
  double mib;
  double create_gib;
  double map_gib;
  double set_access_gib;
  double release_gib;
  double map_and_access;
  double unmap;
};

constexpr std::array<Measured, CostModel::kRows> kMeasured{{
    {2, 5789, 580, 15745, 7012, 31.9, 20.6},
    {4, 2785, 230, 7230, 3744, 29.1, 19.3},
    {8, 1459, 118, 3589, 2248, 29.0, 18.4},
    {16, 810, 56, 1778, 1463, 28.7, 18.2},
    {32, 400, 32, 880, 1100, 28.5, 18.2},
    {64, 221, 16, 501, 821, 32.3, 18.7},
    {128, 142, 9, 288, 698, 37.1, 20.6},
    {256, 99, 5, 178, 630, 45.9, 23.3},
    {512, 67, 2, 110, 585, 55.9, 27.5},
}};

HandleCosts per_handle(const Measured& m) {
  const double handles_in_a_gib = 1024 / m.mib;
  const double map_share = m.map_gib / (m.map_gib + m.set_access_gib);
  return {.mib = m.mib,
          .create_us = m.create_gib / handles_in_a_gib,
          .map_us = m.map_and_access * map_share,
          .set_access_us = m.map_and_access * (1 - map_share),
          .unmap_us = m.unmap,
          .release_us = m.release_gib / handles_in_a_gib};
}

double interpolate(const std::array<HandleCosts, CostModel::kRows>& rows, Bytes size,
                   double HandleCosts::* column) {
  const double mib = static_cast<double>(size.n) / (1 << 20);
  if (mib <= rows.front().mib) return rows.front().*column;
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (mib > rows[i].mib) continue;
    const HandleCosts& low = rows[i - 1];
    const HandleCosts& high = rows[i];
    const double part = (mib - low.mib) / (high.mib - low.mib);
    return low.*column + part * (high.*column - low.*column);
  }
  return rows.back().*column;
}

}  // namespace

CostModel::CostModel() {
  for (std::size_t i = 0; i < kRows; ++i) handles[i] = per_handle(kMeasured[i]);
}

double CostModel::microseconds(DriverCall call, Bytes size) const {
  switch (call) {
    case DriverCall::kReserve: return reserve_us;
    case DriverCall::kUnreserve: return unreserve_us;
    case DriverCall::kCreate: return interpolate(handles, size, &HandleCosts::create_us);
    case DriverCall::kRelease: return interpolate(handles, size, &HandleCosts::release_us);
    case DriverCall::kMap: return interpolate(handles, size, &HandleCosts::map_us);
    case DriverCall::kSetAccess: return interpolate(handles, size, &HandleCosts::set_access_us);
    case DriverCall::kUnmap: return interpolate(handles, size, &HandleCosts::unmap_us);
    case DriverCall::kExport: return export_us;
    case DriverCall::kImport: return import_us;
    case DriverCall::kAllocate: return allocate_us;
    case DriverCall::kFree: return free_us;
    case DriverCall::kRecord: return record_us;
    case DriverCall::kQuery: return query_us;
    case DriverCall::kWait: return wait_us;
    case DriverCall::kMemory: return memory_us;
    case DriverCall::kSynchronize: return synchronize_us;
    case DriverCall::kHold: return hold_us;
    case DriverCall::kCopy:
      return copy_us + copy_us_per_mib * static_cast<double>(size.n) / (1 << 20);
  }
  return 0;
}

}  // namespace gpumemx
