// SPDX-License-Identifier: BSD-3-Clause
//
// What the functions with a device argument share.
#pragma once

#include "adapter/device_view.hpp"

namespace gpumemx::api {

// The index that `device` means. Throws std::out_of_range where CUDA has no such device.
int device_index(int device);

// One device as either allocator shows it; the same error.
adapter::DeviceView device_view(int device);

}  // namespace gpumemx::api
