// SPDX-License-Identifier: BSD-3-Clause
//
// What Python is told of requests that fail, before and after: gpumemx/oom.py, gpumemx/pressure.py.
#pragma once

#include <pybind11/pybind11.h>

#include "core/oom.hpp"

namespace gpumemx::bindings {

pybind11::dict to_dict(const MemoryFigures& figures);
void bind_out_of_memory(pybind11::module_& m);

}  // namespace gpumemx::bindings
