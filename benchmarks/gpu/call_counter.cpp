// SPDX-License-Identifier: BSD-3-Clause
//
// Counts the calls of CUDA's runtime that make a program wait or give memory back, whoever in the
// process makes them: torch's libraries find these functions first when this one is preloaded
// (LD_PRELOAD). calls_made() reads the counters. gpumemx calls the driver, not the runtime; it counts
// its own calls.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr std::array<const char*, 5> kNames{"cudaDeviceSynchronize", "cudaStreamSynchronize",
                                            "cudaEventSynchronize", "cudaMalloc", "cudaFree"};
std::array<std::atomic<std::uint64_t>, kNames.size()> counts;

// The function that would have been called. torch loads the runtime in a scope of its own, where
// RTLD_NEXT does not look.
void* original(const char* name) {
  static void* const runtime = ::dlopen(
      ("libcudart.so." + std::to_string(CUDART_VERSION / 1000)).c_str(), RTLD_LAZY | RTLD_NOLOAD);
  void* function = runtime == nullptr ? nullptr : ::dlsym(runtime, name);
  if (function == nullptr) {
    std::fprintf(stderr, "call_counter: CUDA's runtime has no %s\n", name);
    std::abort();
  }
  return function;
}

template <std::size_t kIndex, class Function, class... Arguments>
cudaError_t counted(Function, Arguments... arguments) {
  static const auto call = reinterpret_cast<Function>(original(kNames[kIndex]));
  counts[kIndex].fetch_add(1, std::memory_order_relaxed);
  return call(arguments...);
}

}  // namespace

#define GPUMEMX_EXPORT extern "C" __attribute__((visibility("default")))

GPUMEMX_EXPORT cudaError_t cudaDeviceSynchronize() { return counted<0>(&cudaDeviceSynchronize); }
GPUMEMX_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return counted<1>(&cudaStreamSynchronize, stream);
}
GPUMEMX_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return counted<2>(&cudaEventSynchronize, event);
}
GPUMEMX_EXPORT cudaError_t cudaMalloc(void** address, std::size_t size) {
  return counted<3>(static_cast<cudaError_t (*)(void**, std::size_t)>(&cudaMalloc), address, size);
}
GPUMEMX_EXPORT cudaError_t cudaFree(void* address) { return counted<4>(&cudaFree, address); }

// How often the function of that name was called; ~0 if it is not counted.
GPUMEMX_EXPORT std::uint64_t calls_made(const char* name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (std::strcmp(kNames[i], name) == 0) return counts[i].load(std::memory_order_relaxed);
  }
  return ~std::uint64_t{0};
}
