// SPDX-License-Identifier: BSD-3-Clause
//
// The bytes of a pickle, from memory or from a file that is read in pieces: what is held of a file
// is one piece, whatever its size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace gpumemx {

class PickleInput {
 public:
  // Borrows the bytes.
  explicit PickleInput(std::span<const std::byte> bytes);
  // Fails: kInvalidArgument with the system's words, or when `path` is no regular file.
  static Result<PickleInput> open(const std::string& path);

  PickleInput(PickleInput&& other) noexcept;
  PickleInput(const PickleInput&) = delete;
  PickleInput& operator=(const PickleInput&) = delete;
  PickleInput& operator=(PickleInput&&) = delete;
  ~PickleInput();

  std::uint64_t total() const { return total_; }
  std::uint64_t position() const { return base_ + at_; }
  std::uint64_t left() const { return total_ - position(); }

  // The next `n` bytes, valid until the next call; empty when there are not so many, and nothing is
  // consumed then. REQUIRES: 0 < n <= kMaxPiece.
  std::string_view take(std::size_t n) {
    if (window_.size() - at_ < n && !refill(n)) return {};
    const std::string_view piece = window_.substr(at_, n);
    at_ += n;
    return piece;
  }
  // Up to and without the next '\n', which is consumed too; false when there is none in kMaxLine.
  bool take_line(std::string& line);
  // False when there are not so many.
  bool skip(std::uint64_t n);

  // True when the file could not be read although it should have had more, with why.
  const std::string& failure() const { return failure_; }

  static constexpr std::size_t kMaxPiece = std::size_t{1} << 16;
  static constexpr std::size_t kMaxLine = 4096;

 private:
  PickleInput() = default;
  bool refill(std::size_t n);

  std::string_view window_;  // bytes of the input from base_ on
  std::size_t at_ = 0;       // in the window
  std::uint64_t base_ = 0;
  std::uint64_t total_ = 0;
  std::vector<char> buffer_;
  int file_ = -1;
  std::string failure_;
};

}  // namespace gpumemx
