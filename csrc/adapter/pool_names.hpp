// SPDX-License-Identifier: BSD-3-Clause
//
// torch's ids of the cores' private pools. Reading takes no lock: entries for trackers are made with a
// device's books locked, and who makes pools calls the core with locks of its own.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <atomic>
#include <memory>

#include "core/history.hpp"
#include "runtime/registry.hpp"

namespace gpumemx::adapter {

class PoolNames {
 public:
  static PoolNames& instance() {
    static PoolNames* names = new PoolNames;  // leaked: read until the process is gone
    return *names;
  }

  // REQUIRES: one caller at a time for each device; before the first allocation from the pool.
  void set(c10::DeviceIndex device, PoolId pool, c10::MempoolId_t id) {
    const auto number = static_cast<std::size_t>(pool);
    if (number >= kChunk * kChunks) return;  // four million pools ago
    auto& table = tables_[static_cast<std::size_t>(device)];
    if (table.load(std::memory_order_relaxed) == nullptr) table.store(new Table{});
    auto& chunk = (*table.load(std::memory_order_relaxed))[number / kChunk];
    if (chunk.load(std::memory_order_relaxed) == nullptr) chunk.store(new Chunk{});
    (*chunk.load(std::memory_order_relaxed))[number % kChunk] = id;
  }

  // {0, number} for a pool that has no name; that is {0, 0} for the default pool.
  c10::MempoolId_t of(c10::DeviceIndex device, PoolId pool) const {
    const auto number = static_cast<std::size_t>(pool);
    const c10::MempoolId_t unnamed{0, number};
    if (number == 0 || number >= kChunk * kChunks) return unnamed;
    const Table* table = tables_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
    if (table == nullptr) return unnamed;
    const Chunk* chunk = (*table)[number / kChunk].load(std::memory_order_acquire);
    if (chunk == nullptr || (*chunk)[number % kChunk] == c10::MempoolId_t{0, 0}) return unnamed;
    return (*chunk)[number % kChunk];
  }

 private:
  static constexpr std::size_t kChunk = 1024;
  static constexpr std::size_t kChunks = 4096;
  using Chunk = std::array<c10::MempoolId_t, kChunk>;
  using Table = std::array<std::atomic<Chunk*>, kChunks>;

  std::array<std::atomic<Table*>, DeviceRegistry::kMaxDevices> tables_{};
};

}  // namespace gpumemx::adapter
