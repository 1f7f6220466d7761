// SPDX-License-Identifier: BSD-3-Clause
#include "adapter/blas_workspaces.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <tuple>
#include <utility>

#if GPUMEMX_TORCH_WORKSPACES

// As ATen/cuda/CUDAContextLight.h has it, which would need the headers of cuBLAS, cuSPARSE and cuSOLVER.
// cmake/adapter.cmake compares the two, and sets the macro to what it found.
namespace at::cuda {

#if GPUMEMX_TORCH_WORKSPACES == 2
using GpumemxWorkspace = std::pair<c10::DataPtr, std::size_t>;
#else
using GpumemxWorkspace = c10::DataPtr;
#endif

struct C10_EXPORT WorkspaceMapWithMutex {
  std::map<std::tuple<void*, void*>, GpumemxWorkspace> map;
  std::shared_mutex mutex;
};

C10_IMPORT WorkspaceMapWithMutex& cublas_handle_stream_to_workspace();
C10_IMPORT WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace();

}  // namespace at::cuda

namespace gpumemx::adapter {

namespace {

template <class Workspace>
auto& memory_of(Workspace& workspace) {
  if constexpr (requires { workspace.first; }) {
    return workspace.first;
  } else {
    return workspace;
  }
}

// Whoever sets cuBLAS up holds it, and may wait inside for Python's lock, which our caller has.
bool lock_for_a_moment(std::shared_lock<std::shared_mutex>& lock) {
  for (int tries = 0; tries < 50; ++tries) {
    if (lock.try_lock()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return false;
}

}  // namespace

std::optional<std::vector<DeviceAddr>> blas_workspaces() {
  std::vector<DeviceAddr> found;
  for (auto* kept : {&at::cuda::cublas_handle_stream_to_workspace(),
                     &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    std::shared_lock lock(kept->mutex, std::defer_lock);
    if (!lock_for_a_moment(lock)) return std::nullopt;
    for (const auto& [key, workspace] : kept->map) {
      const auto address = reinterpret_cast<std::uintptr_t>(memory_of(workspace).get());
      if (address != 0) found.push_back({address});
    }
  }
  // cuBLAS and cuBLASLt may share one.
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

bool plant_blas_workspace(c10::DataPtr memory) {
  auto& kept = at::cuda::cublas_handle_stream_to_workspace();
  const std::unique_lock lock(kept.mutex);
  void* handle = memory.get();  // any that is nobody else's
  memory_of(kept.map[{handle, nullptr}]) = std::move(memory);
  return true;
}

}  // namespace gpumemx::adapter

#else

namespace gpumemx::adapter {

std::optional<std::vector<DeviceAddr>> blas_workspaces() { return std::nullopt; }
bool plant_blas_workspace(c10::DataPtr) { return false; }

}  // namespace gpumemx::adapter

#endif
