// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/recording.hpp"

#include <ATen/Context.h>
#include <torch/csrc/cuda/memory_snapshot.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include "adapter/install.hpp"

namespace gpumemx::adapter {

namespace {

// Of C++ alone: a program that embeds Python has Python's own switch for it.
std::shared_ptr<c10::GatheredContext> cpp_stack() {
  return torch::CapturedTraceback::gather(/*python=*/false, /*script=*/false, /*cpp=*/true);
}

}  // namespace

void start_recording(std::size_t max_entries, bool stacks) {
  // torch's own allocator records on the devices that it has, and has none before it has started. This
  // is torch::cuda::_record_memory_history() but for that: it always starts CUDA.
  if (installed() == nullptr) at::globalContext().lazyInitDevice(c10::kCUDA);
  torch_alloc::recordHistory(
      true, stacks ? cpp_stack : nullptr, max_entries,
      stacks ? torch_alloc::RecordContext::ALL : torch_alloc::RecordContext::NEVER,
      /*clearHistory=*/true, /*skip_actions=*/{});
}

namespace {

// torch's own allocator asks CUDA for the current device, and fails where there is none.
bool can_record() { return installed() != nullptr || torch_alloc::get()->initialized(); }

}  // namespace

void stop_recording() {
  if (!can_record()) return;
  torch_alloc::recordHistory(false, nullptr, 1, torch_alloc::RecordContext::NEVER,
                             /*clearHistory=*/false, /*skip_actions=*/{});
}

bool is_recording() { return can_record() && torch_alloc::isHistoryEnabled(); }

std::string pickled_snapshot() { return torch::cuda::_memory_snapshot_pickled(); }

}  // namespace gpumemx::adapter
