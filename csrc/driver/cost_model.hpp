// SPDX-License-Identifier: BSD-3-Clause
//
// What a driver call costs, as numbers. The simulation charges these to its meter; it never sleeps.
// The defaults were measured on one H200, driver 580, CUDA 13.0 (docs/design.md, "What the driver
// costs"). The cost of a virtual-memory call is per handle, not per byte: hence a table by the size
// of the handle, interpolated linearly between its rows and flat outside.
#pragma once

#include <array>

#include "base/units.hpp"
#include "driver/device_driver.hpp"

namespace gpumemx {

// Microseconds of one call on one handle of `mib`.
struct HandleCosts {
  double mib;
  double create_us;
  double map_us;
  double set_access_us;
  double unmap_us;
  double release_us;
};

struct CostModel {
  static constexpr std::size_t kRows = 9;

  CostModel();  // the measured values

  // What a successful `call` costs. `size` is that of the handle, where the call concerns one.
  double microseconds(DriverCall call, Bytes size = {}) const;

  std::array<HandleCosts, kRows> handles;  // ascending in mib

  double reserve_us = 0;     // not measured; a program makes a handful
  double unreserve_us = 0;   // the same
  double export_us = 1150;   // measured 1.1-1.2 ms
  double import_us = 35;     // with the release
  double allocate_us = 190;  // plain cudaMalloc on a busy device; 31-102 idle, up to 840
  double free_us = 190;      // a guess: measured only as "waits for the device", which is not in it
  double record_us = 0.27;
  double query_us = 1.6;
  double wait_us = 1.6;  // of a completed event; the time that work takes is not driver time
  double memory_us = 5.4;
  double synchronize_us = 1.6;    // of an idle device: a guess, after wait_us
  double copy_us = 10;            // of one call, a guess: launch and wait
  double hold_us = 20;            // a guess: a callback and an event on a few streams
  double copy_us_per_mib = 0.53;  // copy kernels measured at 3,973 GB/s, read and write together
};

}  // namespace gpumemx
