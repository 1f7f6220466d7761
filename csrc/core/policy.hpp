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
// An unmapping that a program waits for while it launches kernels takes 70 to 100 us.
inline constexpr double kBusyRepointCost = 80.0 / 47;

// The handle that most heaps begin with.
inline constexpr Bytes kWholeHandle{8u << 20};

struct Policy {
  const Options& options;
  Bytes reserved;   // now
  Bytes peak_live;  // bytes asked for, at most, since the start or since the cache was emptied
  Bytes capacity;   // what this process may reach at all: the cap, or the device
  bool has_settled = true;  // the peak has hardly grown for a while (allocator.cpp, note_peak())
  Bytes idle{};             // reserved and not asked for by anybody; known at a miss
  Bytes streak{};  // what the request's heap has grown by since a miss of it last used memory again

  bool tight() const { return is_beyond(options.tight_from); }
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

  // What may wait to be released, at most. It is reserved meanwhile.
  Bytes doomed_at_most() const {
    constexpr std::uint64_t kShare = 512;
    return std::max(kWholeHandle * 3, Bytes{peak_live.n / kShare});
  }

  double price(HeapKind kind) const {
    const double price = fills_pages(kind) ? options.price_pages * plenty() : options.price;
    return tight() ? std::min(price, options.tight_price) : price;
  }

  // What dropping a mapping that is in the way costs: as much as beside kernels where there is memory
  // to spare for it. Elsewhere that price makes programs reserve up to 0.4 % more.
  double repoint_cost() const {
    return spare() > Bytes{} && !tight() ? kBusyRepointCost : kRepointCost;
  }

  // What a hit makes idle memory busy would have to be grown again: as far as growth is free, so is
  // that.
  Bytes hit_waste() const {
    if (tight()) return std::min(options.hit_waste, options.tight_hit_waste);
    // A search costs as much in a large program, and what a hit wastes is less of it.
    constexpr std::uint64_t kShare = 6144;
    const Bytes least =
        std::clamp(Bytes{peak_live.n / kShare}, options.hit_waste, options.hit_waste * 2);
    const Bytes extra = spare();
    const Bytes limit = std::min(capacity, peak_live + extra);  // the budget
    // Where driver calls cost more than memory, so does the search for a place.
    const Bytes usual = least * (extra > Bytes{} ? 2 : 1);
    if (reserved >= limit + kWholeHandle * 2) return usual;
    // The part of a handle that a lone block does not need is nobody's loss.
    const Bytes lone = std::min(limit + kWholeHandle * 2 - reserved, kWholeHandle);
    const Bytes left = limit > reserved ? limit - reserved : Bytes{};
    return std::max({usual, lone, std::min(left, extra)});
  }

  // What a place that needs no handle may waste so that no other is looked at, after `searched` runs: the
  // longer the search, the less is left to find.
  Bytes switch_waste(std::uint64_t searched) const {
    constexpr std::uint64_t kRuns = 5;
    constexpr double kFull = 0.985;
    if (is_beyond(kFull)) return Bytes{};
    return Bytes{hit_waste().n * (kRuns + searched) / (2 * kRuns)};
  }

  // The usual size of a new handle under a block of `block` bytes.
  Bytes handle_size(HeapKind kind, Bytes block) const {
    if (is_small(kind)) return options.small_handle;
    const bool large = fills_pages(kind);
    const Bytes least = large ? options.big_handle : options.rest_handle;
    const Bytes most = large ? options.big_handle_max : options.rest_handle_max;
    // Page blocks cover their handles whole, so theirs need not be of few sizes.
    const Bytes quarter{block.n / 4};
    Bytes size = kind == HeapKind::kPages ? round_down(quarter, kPage) : pow2_pages_below(quarter);
    size = std::clamp(size, least, std::max(least, std::min(most, most_for_capacity())));
    return tight() ? std::min(size, options.tight_handle) : size;
  }

  // Pages of the handle to create for a gap of `gap` pages under a block of `block` bytes. May be more
  // than the gap where free addresses follow: the next block goes on there.
  std::uint32_t handle_pages(HeapKind kind, std::uint64_t gap, Bytes block) const {
    const std::uint32_t n = pages(handle_size(kind, block));
    if (kind != HeapKind::kPages) return n;
    return std::max(static_cast<std::uint32_t>(std::clamp<std::uint64_t>(gap, 1, n)),
                    streak_pages(block));
  }

  // How many pages a handle may go beyond its gap where reserved memory goes beyond the budget.
  std::uint32_t ahead_pages(HeapKind kind) const {
    if (tight()) return 0;
    return kind == HeapKind::kPages ? 15 : 3;
  }

  static std::uint32_t pages(Bytes size) { return static_cast<std::uint32_t>(size.n / kPage.n); }

 private:
  bool is_beyond(double share) const {  // of the capacity
    return static_cast<double>(reserved.n) >= share * static_cast<double>(capacity.n);
  }

  // While much is idle, waste costs little: a driver call is worth up to twice as much of it. From a fifth
  // of the peak of live memory on, in full at three tenths.
  double plenty() const {
    if (peak_live == Bytes{}) return 1;
    const double share = static_cast<double>(idle.n) / static_cast<double>(peak_live.n);
    return std::clamp(1 + 10 * (share - 0.2), 1.0, 2.0);
  }

  // Large handles that were laid out while there was room stand in the way when it gets narrow.
  Bytes most_for_capacity() const {
    constexpr std::uint64_t kHandles = 1024;
    return pow2_pages_below({capacity.n / kHandles});
  }

  // Page blocks that come one after the other with nothing freed between them (the weights of a model)
  // share handles: up to four of them, a 16th of what the streak has laid out.
  std::uint32_t streak_pages(Bytes block) const {
    constexpr Bytes kMost{32u << 20};
    constexpr std::uint64_t kBlocks = 4;
    constexpr std::uint64_t kShare = 16;
    if (tight() || block > kMost) return 0;
    const Bytes share{streak < kPage ? 0 : pow2_pages_below(streak).n / kShare};
    const Bytes most = std::max(options.big_handle, most_for_capacity());
    return pages(std::min({kMost, block * kBlocks, share, most}));
  }
};

}  // namespace gpumemx
