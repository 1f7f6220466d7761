// SPDX-License-Identifier: BSD-3-Clause
//
// What the user's blocks of one stream have changed since it was last added to the device's figures
// (stats.hpp): how many, their bytes, the bytes asked for; now, as the sum of all increases, and at the
// highest. One addition each, since every request pays for it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/size_classes.hpp"
#include "core/stats.hpp"

namespace gpumemx {

class Tally {
 public:
  void add(Bytes block, Bytes requested) {
    const Sum sum{1, static_cast<std::int64_t>(block.n), static_cast<std::int64_t>(requested.n)};
    const std::size_t part = part_of(block);
    got_[part] += sum;
    now_[part] += sum;
    now_[kAll] += sum;
    top_[part].raise(now_[part]);
    top_[kAll].raise(now_[kAll]);
  }
  void sub(Bytes block, Bytes requested) {
    const Sum sum{-1, -static_cast<std::int64_t>(block.n), -static_cast<std::int64_t>(requested.n)};
    now_[part_of(block)] += sum;
    now_[kAll] += sum;
  }

  // Of two streams: what was highest may have been at different times.
  Tally& operator+=(const Tally& other) {
    for (std::size_t i = 0; i < now_.size(); ++i) {
      now_[i] += other.now_[i];
      top_[i] += other.top_[i];
    }
    for (std::size_t i = 0; i < got_.size(); ++i) got_[i] += other.got_[i];
    return *this;
  }

  // Into the figures of blocks that the user has: the pending ones, which only count as active, are not
  // of a tally.
  void add_to(Stats& stats) const {
    add_to(stats.allocation, &Sum::count);
    add_to(stats.active, &Sum::count);
    add_to(stats.allocated_bytes, &Sum::bytes);
    add_to(stats.active_bytes, &Sum::bytes);
    add_to(stats.requested_bytes, &Sum::requested);
  }

  std::int64_t requests() const { return got_[kSmall].count + got_[kLarge].count; }
  std::int64_t requested_now() const { return now_[kAll].requested; }
  std::int64_t requested_top() const { return top_[kAll].requested; }
  std::int64_t bytes_top() const { return top_[kAll].bytes; }

 private:
  struct Sum {
    std::int64_t count = 0, bytes = 0, requested = 0;
    Sum& operator+=(const Sum& s) {
      count += s.count;
      bytes += s.bytes;
      requested += s.requested;
      return *this;
    }
    void raise(const Sum& s) {
      count = std::max(count, s.count);
      bytes = std::max(bytes, s.bytes);
      requested = std::max(requested, s.requested);
    }
  };
  static constexpr std::size_t kSmall = 0, kLarge = 1, kAll = 2;
  static std::size_t part_of(Bytes block) { return block <= kTorchSmall ? kSmall : kLarge; }

  void add_to(StatArray& stat, std::int64_t Sum::* of) const {
    const auto apply = [&](StatArray::Part part, std::size_t i, std::int64_t got) {
      stat.part[part].add_run(now_[i].*of, top_[i].*of, got);
    };
    apply(StatArray::kAll, kAll, got_[kSmall].*of + got_[kLarge].*of);
    apply(StatArray::kSmall, kSmall, got_[kSmall].*of);
    apply(StatArray::kLarge, kLarge, got_[kLarge].*of);
  }

  std::array<Sum, 3> now_, top_;
  std::array<Sum, 2> got_;
};

}  // namespace gpumemx
