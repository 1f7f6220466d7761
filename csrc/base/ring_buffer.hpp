// SPDX-License-Identifier: BSD-3-Clause
//
// A history of fixed length: when it is full, the oldest entry is overwritten. Memory is taken once,
// by reset().
#pragma once

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
    entries_.clear();
    entries_.shrink_to_fit();
    entries_.reserve(capacity);
    capacity_ = capacity;
    pushed_ = 0;
  }

  void push(T entry) {
    if (entries_.size() < capacity_) {
      entries_.push_back(std::move(entry));
    } else {
      entries_[pushed_ % capacity_] = std::move(entry);
    }
    ++pushed_;
  }

  std::size_t size() const { return entries_.size(); }
  std::size_t capacity() const { return capacity_; }
  std::uint64_t overwritten() const { return pushed_ - entries_.size(); }

  // The i-th entry from the oldest that is still here. REQUIRES: i < size().
  const T& operator[](std::size_t i) const {
    return entries_[entries_.size() < capacity_ ? i : (pushed_ + i) % capacity_];
  }

 private:
  std::vector<T> entries_;
  std::size_t capacity_ = 0;
  std::uint64_t pushed_ = 0;
};

}  // namespace gpumemx
