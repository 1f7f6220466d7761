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

// What went wrong, in words for the user.
struct InstallFailure {
  enum Kind {
    kImpossible,
    kTooLate,  // CUDA has started, and `late` was not asked for
    kSetting,  // one of torch's variables has a mistake
  };
  Kind kind;
  std::string text;
};

// Nothing when it went well. Starts no CUDA unless it is late.
// REQUIRES: no other thread allocates CUDA memory at this moment (SetAllocator is not thread-safe).
std::optional<InstallFailure> install(InstallRequest request);

// Null until install() has succeeded.
TorchAllocator* installed();

// Whether torch's allocator is gpumemx's, also when another copy of this code installed it: the Python
// package has one, the C++ library another, and each knows only what it installed itself.
bool is_installed_by_anyone();

// Our keys that torch's parser accepts inside PYTORCH_ALLOC_CONF, and what a later
// setAllocatorSettings() said about them that could not be applied; empty when nothing is wrong.
std::string settings_complaint();

// What is in force and where it came from. REQUIRES: installed().
std::vector<SettingSet::Entry> settings_in_force();

}  // namespace gpumemx::adapter
