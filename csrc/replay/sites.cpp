// SPDX-License-Identifier: BSD-3-Clause
#include "replay/sites.hpp"

#include <algorithm>
#include <span>
#include <string_view>

namespace gpumemx {

namespace {

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// A file of the package torch, wherever it is installed; code that torch's compiler wrote; C++.
bool is_torch(std::string_view file, std::string_view function) {
  if (file.empty() || file == "??" || file.starts_with("<")) return true;
  if (file.starts_with("torch/") || has(file, "-packages/torch/")) return true;
  if (has(file, "torchinductor_") || has(file, "/torch_compile_debug/")) return true;
  if (has(function, "::")) return true;
  return file.ends_with(".cpp") || file.ends_with(".cc") || file.ends_with(".cu") ||
         file.ends_with(".h") || file.ends_with(".hpp") || file.ends_with(".c") || has(file, ".so");
}

// A C++ frame that no program wrote: of torch, of its allocator or of the system's start-up code.
bool is_library(std::string_view file, std::string_view function) {
  if (function.empty() || function == "??" || file.ends_with(".py")) return true;
  const std::string_view name =
      function.substr(0, function.find('('));  // arguments are torch's often
  for (const std::string_view space :
       {"torch::", "c10::", "at::", "caffe2::", "std::", "__gnu_cxx::", "gpumemx::adapter::"}) {
    if (has(name, space)) return true;
  }
  for (const std::string_view start :
       {"start_thread", "clone", "_start", "__libc_", "execute_native_thread_routine", "__clone"}) {
    if (name.starts_with(start)) return true;
  }
  return false;
}

// cuBLAS's workspace as torch asks for it on cards before Hopper: 2 x 4 MiB and 8 x 16 KiB.
constexpr std::uint64_t kBlasWorkspace = 2 * (4096u << 10) + 8 * (16u << 10);

}  // namespace

const char* to_string(Category category) {
  switch (category) {
    case Category::kParameters: return "parameters";
    case Category::kGradients: return "gradients";
    case Category::kOptimizerState: return "optimizer state";
    case Category::kActivations: return "activations";
    case Category::kWorkspaces: return "workspaces";
    case Category::kUnknown: return "unknown";
  }
  return "unknown";
}

Sites::Sites(const Snapshot& snapshot, const RecordedRun& run) : snapshot_(snapshot) {
  const auto stacks =
      std::span(snapshot.entries.stack).subspan(run.entries.first, run.entries.count);
  has_stacks_ = std::any_of(stacks.begin(), stacks.end(), [](std::uint32_t s) { return s != 0; });
}

Sites::Frame Sites::frame(std::uint32_t number) const {
  const SnapshotFrame& f = snapshot_.stacks.frame_at(number);
  return {snapshot_.texts[f.file], snapshot_.texts[f.function], f.line};
}

const std::string& Sites::site(const RecordedBlock& block) {
  static const std::string kBefore = "(before the recording)";
  static const std::string kBackward = "(no Python frames: the backward pass)";
  static const std::string kNoFrames = "(no frames recorded)";
  if (block.stack != 0) {
    const auto [found, added] = sites_.try_emplace(block.stack);
    if (added) found->second = site_of_stack(block.stack);
    return found->second;
  }
  if (block.before) return kBefore;
  if (const std::string_view text = snapshot_.texts[block.metadata]; !text.empty()) {
    return attached_.try_emplace(block.metadata, text).first->second;
  }
  return has_stacks_ ? kBackward : kNoFrames;
}

std::string Sites::site_of_stack(std::uint32_t stack_number) const {
  const auto stack = snapshot_.stacks[stack_number];
  auto own = std::find_if(stack.begin(), stack.end(), [&](std::uint32_t number) {
    const Frame f = frame(number);
    return !is_torch(f.file, f.function);
  });
  if (own == stack.end()) {  // a C++ program, or a thread of torch's
    own = std::find_if(stack.begin(), stack.end(), [&](std::uint32_t number) {
      const Frame f = frame(number);
      return !is_library(f.file, f.function);
    });
  }
  const Frame f = frame(own == stack.end() ? stack.front() : *own);
  std::string text(f.file.empty() ? "??" : f.file);
  text += ":" + std::to_string(f.line);
  if (!f.function.empty()) text += " " + std::string(f.function);
  return text;
}

Category Sites::category(const RecordedBlock& block) {
  if (block.size == kBlasWorkspace) return Category::kWorkspaces;
  if (block.stack == 0) {
    // autograd's threads run no Python, so where others have frames these are of the backward pass.
    return has_stacks_ && !block.before ? Category::kGradients : Category::kUnknown;
  }
  const auto [found, added] = categories_.try_emplace(block.stack, Category::kUnknown);
  if (added) found->second = category_of_stack(block.stack);
  return found->second;
}

// By the innermost frame that says anything: recomputed activations have forward() above backward(),
// and a parameter that is made lazily has its module's code above the loop's.
Category Sites::category_of_stack(std::uint32_t stack_number) const {
  const auto stack = snapshot_.stacks[stack_number];
  for (const std::uint32_t number : stack) {
    const auto [file, function, line] = frame(number);
    if (has(function, "Workspace") || has(function, "workspace")) return Category::kWorkspaces;
    if (has(file, "torch/optim/")) {
      // States are made in here, at the first step; the rest of a step is temporary.
      if (function == "_init_group" || function == "_init_state") return Category::kOptimizerState;
      if (function == "step" || function.starts_with("_multi_tensor_") ||
          function.starts_with("_single_tensor_") || function.starts_with("_fused_")) {
        return Category::kWorkspaces;
      }
    }
    if (has(file, "torch/autograd/") &&
        (function == "backward" || function == "grad" || function == "_engine_run_backward")) {
      return Category::kGradients;
    }
    if (has(file, "torch/nn/modules/module.py") &&
        (function == "convert" || function == "_apply" || function == "to" || function == "cuda" ||
         function == "load_state_dict" || function == "to_empty")) {
      return Category::kParameters;
    }
    if (has(file, "torch/nn/parameter.py") || function == "__init__" ||
        function == "reset_parameters" || function == "from_pretrained") {
      return Category::kParameters;
    }
    if (function == "forward" || function == "_call_impl" || function == "_wrapped_call_impl") {
      return Category::kActivations;
    }
  }
  return Category::kUnknown;
}

}  // namespace gpumemx
