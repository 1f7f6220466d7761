// SPDX-License-Identifier: BSD-3-Clause
//
// The policies by name.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/options.hpp"
#include "replay/policy_model.hpp"
#include "replay/torch_options.hpp"

namespace gpumemx {

struct PolicyOptions {
  std::string policy = "gpumemx";
  MemoryLimits limits;
  double lag_ms = 20;  // of the device behind the host; torch's allocator asks for no events
  Options core;        // of gpumemx; `background` is set by the replay
  TorchOptions torch;  // of native and expandable; `expandable_segments` is set by the policy

  static constexpr double kMaxLagMs = 3.6e6;  // an hour

  // The first setting out of its range, in words, or nothing.
  std::optional<std::string> validate() const;
};

std::vector<std::string_view> policy_names();

// REQUIRES: options.validate() finds nothing.
std::unique_ptr<PolicyModel> make_policy(const PolicyOptions& options);

}  // namespace gpumemx
