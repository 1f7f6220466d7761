// SPDX-License-Identifier: BSD-3-Clause
//
// Adds what can be said without torch about settings and devices.
#pragma once

#include <pybind11/pybind11.h>

namespace gpumemx::bindings {

void bind_runtime(pybind11::module_& module);

}  // namespace gpumemx::bindings
