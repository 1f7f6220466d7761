// SPDX-License-Identifier: BSD-3-Clause
//
// The C++ interface on the device of this machine, through torch, as a program uses it.
#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "cpp/testbed.hpp"

namespace gpumemx::testbed {

void install(const Settings& settings) {
  if (is_installed()) return;
  install_allocator(settings);
  at::globalContext().lazyInitDevice(c10::kCUDA);
}

void* allocate(std::uint64_t bytes) { return c10::cuda::CUDACachingAllocator::raw_alloc(bytes); }
void free(void* memory) { c10::cuda::CUDACachingAllocator::raw_delete(memory); }

std::shared_ptr<void> make_tensor(std::uint64_t bytes) {
  auto tensor = std::make_shared<at::Tensor>(
      at::empty({static_cast<std::int64_t>(bytes)}, at::device(at::kCUDA).dtype(at::kByte)));
  tensor->fill_(1);
  return tensor;
}

std::uint64_t driver_free() {
  return c10::cuda::CUDACachingAllocator::get()->getMemoryInfo(0).first;
}

}  // namespace gpumemx::testbed
