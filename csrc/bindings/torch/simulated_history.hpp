// SPDX-License-Identifier: BSD-3-Clause
//
// What tests of the memory history do on simulated devices: torch's own functions for it start CUDA.
#pragma once

#include <pybind11/pybind11.h>

namespace gpumemx::bindings {

void bind_simulated_history(pybind11::module_& m);

}  // namespace gpumemx::bindings
