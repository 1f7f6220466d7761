// SPDX-License-Identifier: BSD-3-Clause
//
// What bind_snapshot.cpp adds to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace gpumemx::bindings {

void bind_snapshot(pybind11::module_& module);

}  // namespace gpumemx::bindings
