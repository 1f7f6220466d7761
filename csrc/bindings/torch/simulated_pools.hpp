// SPDX-License-Identifier: BSD-3-Clause
//
// Private pools on simulated devices, for tests: what torch's graphs and memory pools do, where torch
// has neither streams nor a current device.
#pragma once

#include <pybind11/pybind11.h>

namespace gpumemx::bindings {

void bind_simulated_pools(pybind11::module_& m);

}  // namespace gpumemx::bindings
