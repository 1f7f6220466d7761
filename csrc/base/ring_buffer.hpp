// SPDX-License-Identifier: BSD-3-Clause
//
// A history of fixed length: when it is full, the oldest entry is overwritten. Its memory comes in
// chunks that never move: the first ones at reset(), so that a push finds them there, the others when
// they are reached, so that a length without a practical limit costs what is used of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gpumemx {

template <class T>
class RingBuffer {
 public:
  // Drops everything. REQUIRES: capacity >= 1, or 0 for a buffer that is off.
  void reset(std::size_t capacity) {
    chunks_.clear();
    chunks_.shrink_to_fit();
    capacity_ = capacity;
    size_ = next_ = 0;
    pushed_ = 0;
    while (chunks_.size() * kChunk < std::min(capacity, kFirst)) add_chunk();
  }

  // Another length; the newest entries stay. REQUIRES: capacity >= 1.
  void resize(std::size_t capacity) {
    if (capacity == capacity_) return;
    RingBuffer kept;
    kept.reset(capacity);
    for (std::size_t i = size_ - std::min(size_, capacity); i < size_; ++i) {
      kept.push(std::move(at(slot(i))));
    }
    kept.pushed_ = pushed_;
    *this = std::move(kept);
  }

  template <class Entry>
  void push(Entry&& entry) {
    if (size_ < capacity_) {
      if (next_ == chunks_.size() * kChunk) add_chunk();
      chunks_[next_ / kChunk].push_back(std::forward<Entry>(entry));
      ++size_;
    } else {
      at(next_) = std::forward<Entry>(entry);
    }
    if (++next_ == capacity_) next_ = 0;
    ++pushed_;
  }

  // The entry that the next push but `n` will overwrite. A hint: null at times, where there is one.
  const T* to_go(std::size_t n) const {
    if (size_ < capacity_ || n >= capacity_ - next_) return nullptr;
    return &chunks_[(next_ + n) / kChunk][(next_ + n) % kChunk];
  }

  std::size_t size() const { return size_; }
  std::size_t capacity() const { return capacity_; }
  std::uint64_t overwritten() const { return pushed_ - size_; }

  // The i-th entry from the oldest that is still here. REQUIRES: i < size().
  const T& operator[](std::size_t i) const {
    const std::size_t s = slot(i);
    return chunks_[s / kChunk][s % kChunk];
  }

 private:
  static constexpr std::size_t kChunk = 1024;
  static constexpr std::size_t kFirst = 16 * kChunk;

  std::size_t slot(std::size_t i) const {
    if (size_ < capacity_) return i;
    const std::size_t to_the_end = capacity_ - next_;
    return i < to_the_end ? next_ + i : i - to_the_end;
  }
  T& at(std::size_t slot) { return chunks_[slot / kChunk][slot % kChunk]; }
  void add_chunk() {
    chunks_.emplace_back();
    chunks_.back().reserve(std::min(kChunk, capacity_ - (chunks_.size() - 1) * kChunk));
  }

  std::vector<std::vector<T>> chunks_;
  std::size_t capacity_ = 0;
  std::size_t size_ = 0;
  std::size_t next_ = 0;  // the slot of the next entry
  std::uint64_t pushed_ = 0;
};

}  // namespace gpumemx
