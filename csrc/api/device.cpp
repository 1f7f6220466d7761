// SPDX-License-Identifier: BSD-3-Clause
#include "api/device.hpp"

#include <c10/util/Exception.h>

#include <gpumemx/memory.hpp>
#include <stdexcept>

namespace gpumemx::api {

adapter::DeviceView device_view(int device) {
  try {
    return adapter::DeviceView(device == kCurrentDevice ? adapter::current_device() : device);
  } catch (const c10::IndexError& error) {
    // Callers need not know torch's exceptions, nor their stacks.
    throw std::out_of_range(error.what_without_backtrace());
  }
}

int device_index(int device) { return device_view(device).device(); }

}  // namespace gpumemx::api
