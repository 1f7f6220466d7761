// SPDX-License-Identifier: BSD-3-Clause
//
// Puts gpumemx in the place of torch's CUDA allocator, once and for the life of the process.
#pragma once

#include <optional>
#include <string>

#include "adapter/torch_allocator.hpp"
#include "runtime/registry.hpp"
#include "runtime/setting_set.hpp"

namespace gpumemx::adapter {

struct InstallRequest {
  SettingSet settings;  // with everything but torch's variables, which install() reads itself
  // Also when torch's own allocator is in use already: its blocks stay its own.
  bool late = false;
  DeviceRegistry::OpenDriver open;  // libcuda where empty
  int simulated_devices = 0;        // with `open`: torch can't count devices that are not there
};

// What went wrong, in words for the user, or nothing. Starts no CUDA unless it is late.
// REQUIRES: no other thread allocates CUDA memory at this moment (SetAllocator is not thread-safe).
std::optional<std::string> install(InstallRequest request);

// Null until install() has succeeded.
TorchAllocator* installed();

// Our keys that torch's parser accepts inside PYTORCH_ALLOC_CONF, and what a later
// setAllocatorSettings() said about them that could not be applied; empty when nothing is wrong.
std::string settings_complaint();

// What is in force and where it came from. REQUIRES: installed().
std::vector<SettingSet::Entry> settings_in_force();

}  // namespace gpumemx::adapter
