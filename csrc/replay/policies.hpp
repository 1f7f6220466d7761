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
  Options core = core_defaults();  // of gpumemx
  TorchOptions torch;              // of native and expandable, which has expandable segments anyway

  static constexpr double kMaxLagMs = 3.6e6;  // an hour

  // What the core has beside a thread that does its background work.
  static Options core_defaults();

  // The first setting out of its range, in words, or nothing.
  std::optional<std::string> validate() const;
};

std::vector<std::string_view> policy_names();

// REQUIRES: options.validate() finds nothing.
std::unique_ptr<PolicyModel> make_policy(const PolicyOptions& options);

}  // namespace gpumemx
