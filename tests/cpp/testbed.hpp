// SPDX-License-Identifier: BSD-3-Clause
//
// What the scenarios of the C++ interface run on: a simulated device (testbed_sim.cpp) or the real one
// (testbed_cuda.cpp), one program each. gpumemx is installed once in a process.
#pragma once

#include <cstdint>
#include <gpumemx/gpumemx.hpp>
#include <memory>
#include <utility>

namespace gpumemx::testbed {

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// As main() would, and starts CUDA, so that memory can be allocated. Later calls do nothing.
void install(const Settings& settings);

// Device memory as torch gives it to a tensor. Throws c10::OutOfMemoryError.
void* allocate(std::uint64_t bytes);
void free(void* memory);

// A tensor of torch's where there is a device for one, with work queued on it.
std::shared_ptr<void> make_tensor(std::uint64_t bytes);

// The device's free memory as the driver says it; what the test is measured against.
std::uint64_t driver_free();

class Block {
 public:
  explicit Block(std::uint64_t bytes) : memory_(allocate(bytes)) {}
  ~Block() { reset(); }
  Block(Block&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
  Block& operator=(Block&& other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  void reset() {
    if (void* memory = std::exchange(memory_, nullptr)) free(memory);
  }

 private:
  void* memory_;
};

}  // namespace gpumemx::testbed
