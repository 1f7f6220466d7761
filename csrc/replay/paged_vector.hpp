// SPDX-License-Identifier: BSD-3-Clause
//
// A vector that grows by pages of 64 Ki elements and never moves one: a large file is read without
// the moment in which a growing vector holds its elements twice.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace gpumemx {

template <class T>
class PagedVector {
 public:
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return (*pages_[i / kPage])[i % kPage]; }  // REQUIRES:
  const T& operator[](std::size_t i) const {
    return (*pages_[i / kPage])[i % kPage];
  }  // i < size()

  void push_back(T value) {
    grow(size_ + 1);
    (*this)[size_ - 1] = value;
  }

  // At least `size` elements; new ones are T{}.
  void grow(std::size_t size) {
    while (pages_.size() * kPage < size) pages_.push_back(std::make_unique<Page>());
    if (size > size_) size_ = size;
  }

 private:
  static constexpr std::size_t kPage = std::size_t{1} << 16;
  using Page = std::array<T, kPage>;

  std::vector<std::unique_ptr<Page>> pages_;
  std::size_t size_ = 0;
};

}  // namespace gpumemx
