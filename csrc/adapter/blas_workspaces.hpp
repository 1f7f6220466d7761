// SPDX-License-Identifier: BSD-3-Clause
//
// The workspaces of cuBLAS. torch takes them from its allocator, one for each handle and stream, and keeps
// them until it is told to drop them: live memory that belongs to no tensor.
#pragma once

#include <c10/core/Allocator.h>

#include <optional>
#include <vector>

#include "base/units.hpp"

namespace gpumemx::adapter {

// Where they begin, on all devices; nothing where this torch keeps them in a way that is not known here,
// or while another thread sets cuBLAS up for longer than 10 ms. Starts no CUDA.
std::optional<std::vector<DeviceAddr>> blas_workspaces();

// As if it were a workspace, for tests on machines without cuBLAS. False where blas_workspaces() knows
// nothing.
bool plant_blas_workspace(c10::DataPtr memory);

}  // namespace gpumemx::adapter
