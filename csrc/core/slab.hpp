// SPDX-License-Identifier: BSD-3-Clause
//
// Records that never move and are used again: an allocator must not call the host's malloc on every
// operation, and pointers between records must stay valid. A record also has a 32-bit number, half a
// pointer, for the large tables.
//
// Not thread-safe: used under its owner's lock. Only at() may be called by anybody at any time, with a
// number that was given once: records stay while the slab lives, whatever they are used for.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/cache_line.hpp"
#include "base/check.hpp"

namespace gpumemx {

// From calloc: all zeros, and no host memory until it is touched.
struct CallocFree {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using ZeroedArray = std::unique_ptr<T[], CallocFree>;

template <class T>
ZeroedArray<T> zeroed(std::size_t count) {
  T* memory = static_cast<T*>(std::calloc(count, sizeof(T)));
  GPUMEMX_CHECK(memory != nullptr, "the host has no memory left for the allocator's tables");
  return ZeroedArray<T>(memory);
}

// T has a public member `std::uint32_t id`, which the slab sets; number 0 is never given.
template <class T>
class Slab {
 public:
  T* acquire() {
    if (free_.empty()) grow();
    T* record = free_.back();
    free_.pop_back();
    return record;
  }

  // Resets the record, so that nothing it owned outlives it: with its own reset() where it has one,
  // else to T{}.
  void release(T* record) {
    if constexpr (requires { record->reset(); }) {
      record->reset();
    } else {
      const std::uint32_t id = record->id;
      *record = T{};
      record->id = id;
    }
    free_.push_back(record);
  }

  T* at(std::uint32_t id) const {
    return directory_[id / kChunk].load(std::memory_order_acquire) + id % kChunk;
  }

  // Visits every record, in use or not, in the order of their numbers.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const auto& chunk : chunks_) {
      for (std::uint32_t i = 0; i < kChunk; ++i) visit(&chunk[i]);
    }
  }

 private:
  static constexpr std::uint32_t kChunk = 1024;
  static constexpr std::size_t kMostChunks = std::size_t{1} << 18;  // 268 million records

  void grow() {
    GPUMEMX_CHECK(chunks_.size() < kMostChunks, "the allocator's tables are full");
    const auto first = static_cast<std::uint32_t>(chunks_.size()) * kChunk;
    chunks_.push_back(std::make_unique<T[]>(kChunk));
    T* chunk = chunks_.back().get();
    directory_[first / kChunk].store(chunk, std::memory_order_release);
    free_.reserve(chunks_.size() * kChunk);
    // Pushed downwards, so that records come out in the order of their numbers.
    for (std::uint32_t i = kChunk; i-- > 0;) {
      chunk[i].id = first + i;
      if (first + i != 0) free_.push_back(&chunk[i]);
    }
  }

  // For at(), so on a line that hardly anybody writes to; never moves.
  alignas(kCacheLine)
      ZeroedArray<std::atomic<T*>> directory_ = zeroed<std::atomic<T*>>(kMostChunks);
  std::vector<std::unique_ptr<T[]>> chunks_;  // the same
  alignas(kCacheLine) std::vector<T*> free_;
};

}  // namespace gpumemx
