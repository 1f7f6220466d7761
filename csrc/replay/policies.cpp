// SPDX-License-Identifier: BSD-3-Clause
#include "replay/policies.hpp"

#include <algorithm>
#include <array>

#include "replay/gpumemx_model.hpp"
#include "replay/torch_model.hpp"

namespace gpumemx {

namespace {

TorchOptions torch_options(TorchOptions torch, bool expandable) {
  torch.expandable_segments |= expandable;
  return torch;
}

struct PolicyEntry {
  std::string_view name;
  std::optional<std::string> (*mistake)(const PolicyOptions&);
  std::unique_ptr<PolicyModel> (*make)(const PolicyOptions&);
};

template <bool kExpandable>
constexpr PolicyEntry torch_policy(std::string_view name) {
  return {name,
          [](const PolicyOptions& o) { return torch_options(o.torch, kExpandable).validate(); },
          [](const PolicyOptions& o) -> std::unique_ptr<PolicyModel> {
            return std::make_unique<TorchModel>(torch_options(o.torch, kExpandable), o.limits);
          }};
}

constexpr std::array kPolicies{
    PolicyEntry{"gpumemx", [](const PolicyOptions& o) { return o.core.validate(); },
                [](const PolicyOptions& o) -> std::unique_ptr<PolicyModel> {
                  return std::make_unique<GpumemxModel>(o.core, o.limits, o.lag_ms);
                }},
    torch_policy<false>("native"),
    torch_policy<true>("expandable"),
};

const PolicyEntry* find(std::string_view name) {
  const auto found = std::find_if(kPolicies.begin(), kPolicies.end(),
                                  [&](const PolicyEntry& policy) { return policy.name == name; });
  return found == kPolicies.end() ? nullptr : &*found;
}

}  // namespace

Options PolicyOptions::core_defaults() {
  Options core;
  core.background = true;
  return core;
}

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names;
  for (const PolicyEntry& policy : kPolicies) names.push_back(policy.name);
  return names;
}

std::optional<std::string> PolicyOptions::validate() const {
  if (!(lag_ms >= 0 && lag_ms <= kMaxLagMs)) {
    return "the lag must be from 0 to 3600000 milliseconds (an hour)";
  }
  const PolicyEntry* found = find(policy);
  if (found == nullptr) {
    std::string known;
    for (const PolicyEntry& each : kPolicies) {
      known += (known.empty() ? "" : ", ") + std::string(each.name);
    }
    return "there is no policy '" + policy + "'; there are " + known;
  }
  return found->mistake(*this);
}

std::unique_ptr<PolicyModel> make_policy(const PolicyOptions& options) {
  return find(options.policy)->make(options);
}

}  // namespace gpumemx
