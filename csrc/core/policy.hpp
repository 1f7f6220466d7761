// SPDX-License-Identifier: BSD-3-Clause
//
// The numbers behind the choices, for one request: how large new handles are, what a handle to map
// is worth, how much a hit may waste. Near a known capacity (tight) memory is worth more than driver
// time. Pure functions of the options and of what the allocator holds at that moment.
#pragma once

#include <algorithm>

#include "core/options.hpp"
#include "core/size_classes.hpp"

namespace gpumemx {

// Measured on an H200: what a miss costs the driver, in units of mapping one idle handle (47 us with
// the unmapping it causes later).
inline constexpr double kMapCost = 29.0 / 47;
inline constexpr double kRepointCost = 18.0 / 47;
inline constexpr double kSwitchCost = 1.0 / 47;

struct Policy {
  const Options& options;
  Bytes reserved;   // now
  Bytes peak_live;  // bytes asked for, at most, since the start or since the cache was emptied
  Bytes capacity;   // what this process may reach at all: the cap, or the device
  bool has_settled = true;  // the peak has hardly grown for a while (allocator.cpp, note_peak())

  bool tight() const {
    return static_cast<double>(reserved.n) >= options.tight_from * static_cast<double>(capacity.n);
  }
  // What may be reserved beyond the peak of live memory to spare the driver.
  Bytes spare() const {
    const auto share = [&](double s) {
      return Bytes{static_cast<std::uint64_t>(static_cast<double>(peak_live.n) * s)};
    };
    Bytes bytes = share(options.slack);
    // Not where the program may yet come near the capacity: what was laid out generously while it was
    // small stands in its way then.
    constexpr std::uint64_t kRoomy = 4;
    if (has_settled && peak_live < options.cushion_until &&
        capacity.n / kRoomy > options.cushion_until.n) {
      constexpr std::uint64_t kFade = 4;
      bytes += std::min(share(options.cushion), {(options.cushion_until - peak_live).n / kFade});
    }
    return bytes;
  }
  // Growth up to here goes before harvest; beyond it, only when nothing else serves.
  Bytes budget() const { return std::min(capacity, peak_live + spare()); }

  double price(HeapKind kind) const {
    const double price = fills_pages(kind) ? options.price_pages : options.price;
    return tight() ? std::min(price, options.tight_price) : price;
  }

  // What a hit makes idle memory busy would have to be grown again: as far as growth is free, so is
  // that.
  Bytes hit_waste() const {
    if (tight()) return std::min(options.hit_waste, options.tight_hit_waste);
    const Bytes left = budget() > reserved ? budget() - reserved : Bytes{};
    return std::max(options.hit_waste, std::min(left, spare()));
  }

  // A place that only dormant aliases make ready may waste half of that before others are looked at.
  Bytes switch_waste() const { return tight() ? Bytes{} : Bytes{hit_waste().n / 2}; }

  // Pages of the handle to create for a gap of `gap` pages under a block of `block` bytes.
  std::uint32_t handle_pages(HeapKind kind, std::uint64_t gap, Bytes block) const {
    if (is_small(kind)) return pages(options.small_handle);
    Bytes size;
    if (fills_pages(kind)) {
      size =
          std::clamp(pow2_pages_below({block.n / 4}), options.big_handle, options.big_handle_max);
    } else {
      size =
          std::clamp(pow2_pages_below({block.n / 4}), options.rest_handle, options.rest_handle_max);
    }
    if (tight()) size = std::min(size, options.tight_handle);
    const std::uint32_t n = pages(size);
    if (!fills_pages(kind)) return n;
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(gap, 1, n));
  }

  static std::uint32_t pages(Bytes size) { return static_cast<std::uint32_t>(size.n / kPage.n); }
};

}  // namespace gpumemx
