// SPDX-License-Identifier: BSD-3-Clause
//
// What stands before the heaps of a stream, so that most requests and frees take neither the
// allocator's lock nor any other that a thread of another stream wants: bins of blocks that the user
// has freed but the heaps still count as in use (*parked*), one size a bin, and the stream's share of
// the figures.
//
// A parked block can serve only a request of its own size on its own stream. Whoever looks at free
// memory as a whole takes all of them back first (DeviceAllocator::unpark()), and a front holds no more
// than may be free without an event behind it, so nobody else misses that memory. Only small blocks are
// parked: where a large one stands matters for what is reserved, so its place is chosen anew each time.
//
// Locks: a front's comes after the allocator's. Nothing is called with it held that waits.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/cache_line.hpp"
#include "base/mutex.hpp"
#include "core/records.hpp"
#include "core/tally.hpp"

namespace gpumemx {

class alignas(kCacheLine) Front {
 public:
  // Never more than `most_blocks` are parked.
  Front(StreamId stream, std::uint32_t most_blocks) : stream_(stream), most_blocks_(most_blocks) {}
  Front(const Front&) = delete;
  Front& operator=(const Front&) = delete;

  StreamId stream() const { return stream_; }

  // Whether a block of this size was here a moment ago. No lock.
  bool may_have(Bytes size) const {
    return bin(size).size.load(std::memory_order_relaxed) == size.n;
  }
  // A parked block of exactly this size, the one freed last; null when there is none.
  Block* take(Bytes size) GPUMEMX_REQUIRES(mu) {
    Bin& from = bin(size);
    if (from.size.load(std::memory_order_relaxed) != size.n) return nullptr;
    Block* block = from.first;
    from.first = block->list_next;
    if (from.first == nullptr) {
      from.size.store(0, std::memory_order_relaxed);
      used_ &= ~(1ull << index(size));
    }
    block->parked = false;
    --blocks_;
    bytes_ -= size;
    ++reused_;
    return block;
  }

  // False when there is no room. REQUIRES: the block is of this front, it is simple, or is made so while
  // the lock is held.
  bool park(Block* block) GPUMEMX_REQUIRES(mu) {
    const Bytes size = block->size;
    Bin& to = bin(size);
    const std::uint64_t bin_size = to.size.load(std::memory_order_relaxed);
    if ((bin_size != 0 && bin_size != size.n) || is_full(size)) return false;
    block->list_next = to.first;
    to.first = block;
    to.size.store(size.n, std::memory_order_relaxed);
    used_ |= 1ull << index(size);
    block->parked = true;
    ++blocks_;
    bytes_ += size;
    return true;
  }

  // Takes all parked blocks out, in no order that means anything, and calls visit(block) for each.
  template <class Visit>
  void take_all(Visit visit) GPUMEMX_REQUIRES(mu) {
    for (; used_ != 0; used_ &= used_ - 1) {
      Bin& from = bins_[static_cast<std::size_t>(std::countr_zero(used_))];
      from.size.store(0, std::memory_order_relaxed);
      for (Block* block = from.first; block != nullptr;) {
        Block* next = block->list_next;
        block->list_next = nullptr;
        visit(block);
        block = next;
      }
      from.first = nullptr;
    }
    blocks_ = 0;
    bytes_ = {};
  }
  // How many blocks were taken since the last call: frees that the stream's timeline has not heard of.
  std::uint32_t take_reused() GPUMEMX_REQUIRES(mu) { return std::exchange(reused_, 0); }
  bool is_empty() const GPUMEMX_REQUIRES(mu) { return used_ == 0; }
  std::uint64_t parked_blocks() const GPUMEMX_REQUIRES(mu) { return blocks_; }
  Bytes parked_bytes() const GPUMEMX_REQUIRES(mu) { return bytes_; }
  // Whether a block of this size is refused because so much is parked.
  bool is_full(Bytes size) const GPUMEMX_REQUIRES(mu) {
    return blocks_ >= most_blocks_ || (blocks_ >= kFew && bytes_ + size > kMostBytes);
  }

  Mutex mu;
  Tally tally GPUMEMX_GUARDED_BY(mu);
  std::uint64_t hits GPUMEMX_GUARDED_BY(mu) = 0;  // requests served here since the last fold

 private:
  static constexpr int kBinBits = 6;
  // A few blocks of any size, more while they are little together. What is parked is memory that other
  // sizes do not find (docs/design.md, "The hit path").
  static constexpr std::uint32_t kFew = 12;
  static constexpr Bytes kMostBytes{512u << 10};
  struct Bin {
    std::atomic<std::uint64_t> size{0};  // of the blocks in it; 0 while there are none
    Block* first = nullptr;
  };

  // Sizes are multiples of 512 B, large ones mostly of a power of two: all bits have their say.
  static std::size_t index(Bytes size) { return size.n * 0x9E3779B97F4A7C15ull >> (64 - kBinBits); }
  Bin& bin(Bytes size) { return bins_[index(size)]; }
  const Bin& bin(Bytes size) const { return bins_[index(size)]; }

  const StreamId stream_;
  const std::uint32_t most_blocks_;
  std::uint64_t used_ GPUMEMX_GUARDED_BY(mu) = 0;  // bins that are not empty, a bit each
  std::uint32_t blocks_ GPUMEMX_GUARDED_BY(mu) = 0;
  std::uint32_t reused_ GPUMEMX_GUARDED_BY(mu) = 0;
  Bytes bytes_ GPUMEMX_GUARDED_BY(mu);
  std::array<Bin, 1u << kBinBits> bins_;  // written under mu
};

// Holds a front's lock for a scope, where there is a front.
class FrontLock {
 public:
  explicit FrontLock(Front* front) GPUMEMX_NO_TSA : front_(front) {
    if (front_ != nullptr) front_->mu.lock();
  }
  ~FrontLock() GPUMEMX_NO_TSA {
    if (front_ != nullptr) front_->mu.unlock();
  }
  FrontLock(const FrontLock&) = delete;
  FrontLock& operator=(const FrontLock&) = delete;

 private:
  Front* const front_;
};

}  // namespace gpumemx
