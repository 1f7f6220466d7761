// SPDX-License-Identifier: BSD-3-Clause
//
// The kReady blocks of one heap by size, and its kVoid blocks in a plain list.
//
// The front of each bin's list is kept in the order of addresses, as far as kSorted steps find the
// place: low addresses are used first, so that high ones come free together (docs/design.md, "What
// the policy was tuned on"), and an insertion is O(1). A bitmap over the bins finds the next one that
// is not empty in a few steps, however many blocks there are.
//
// Invariant: a block is linked here exactly when its state is kReady (bins) or kVoid (voids()).
//
// Not thread-safe: guarded by the allocator's lock.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/records.hpp"

namespace gpumemx {

class FreeIndex {
 public:
  void insert(Block* block) {
    const bool ready = block->state == BlockState::kReady;
    Block*& head = ready ? bins_[bin_of(block->size)] : voids_;
    Block* before = nullptr;
    Block* after = head;
    for (int n = 0; ready && n < kSorted && after != nullptr && after->begin < block->begin; ++n) {
      before = after;
      after = after->list_next;
    }
    block->list_prev = before;
    block->list_next = after;
    if (after != nullptr) after->list_prev = block;
    (before != nullptr ? before->list_next : head) = block;
    if (ready) mark(bin_of(block->size));
  }

  void remove(Block* block) {
    const bool ready = block->state == BlockState::kReady;
    if (block->list_prev != nullptr) {
      block->list_prev->list_next = block->list_next;
    } else {
      Block*& head = ready ? bins_[bin_of(block->size)] : voids_;
      head = block->list_next;
      if (ready && head == nullptr) unmark(bin_of(block->size));
    }
    if (block->list_next != nullptr) block->list_next->list_prev = block->list_prev;
    block->list_prev = block->list_next = nullptr;
  }

  // The first block of the first bin at or above `bin` that is not empty, or null.
  Block* first_from(std::uint32_t bin) const {
    std::uint32_t word = bin / 64;
    if (word >= kWords) return nullptr;
    std::uint64_t bits = map_[word] & (~0ull << (bin % 64));
    while (bits == 0) {
      if (++word == kWords) return nullptr;
      bits = map_[word];
    }
    return bins_[word * 64 + static_cast<std::uint32_t>(std::countr_zero(bits))];
  }
  // The block after `block` in the order of first_from().
  Block* after(const Block* block) const {
    return block->list_next != nullptr ? block->list_next : first_from(bin_of(block->size) + 1);
  }

  Block* voids() const { return voids_; }

 private:
  static constexpr int kSorted = 16;
  static constexpr std::uint32_t kWords = (kBins + 63) / 64;

  void mark(std::uint32_t bin) { map_[bin / 64] |= 1ull << (bin % 64); }
  void unmark(std::uint32_t bin) { map_[bin / 64] &= ~(1ull << (bin % 64)); }

  std::array<Block*, kBins> bins_{};
  std::array<std::uint64_t, kWords> map_{};
  Block* voids_ = nullptr;
};

}  // namespace gpumemx
