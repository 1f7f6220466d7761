// SPDX-License-Identifier: BSD-3-Clause
//
// Every knob of the core: meaning, unit, range and default. Where a default was measured, docs/design.md
// ("What the policy was tuned on") has the figures. Choices depend on the allocation history and on
// which work is complete, never on a clock, so the same program gives the same figures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/units.hpp"

namespace gpumemx {

struct Options {
  // --- which heap a block goes to
  Bytes small_limit{1u << 20};  // up to here: the heap for small blocks
  Bytes big_from{32u << 20};    // from here, unless a multiple of 2 MiB: the heap for big blocks

  // --- sizes of new handles; powers of two from 2 MiB to 64 MiB
  Bytes small_handle{2u << 20};
  Bytes rest_handle{8u << 20};       // least for the heap of the other blocks ...
  Bytes rest_handle_max{32u << 20};  // ... a quarter of the block, up to this
  Bytes big_handle{8u << 20};        // least for whole-page and big blocks ...
  Bytes big_handle_max{64u << 20};   // ... a quarter of the block, up to this

  // --- hits: free memory that is ready
  int hit_scan = 16;          // entries of the size bins looked at, 1 or more
  Bytes hit_waste{2u << 20};  // idle bytes beyond the block's own that a hit may make busy

  // --- misses: where a place is made ready
  int miss_runs = 32;      // free runs looked at, the smallest that fit
  int miss_extents = 16;   // places looked at in each
  int miss_tries = 8;      // plans tried, cheapest first
  double price = 24;       // MiB of waste that one handle to map is worth
  double price_pages = 4;  // the same for whole-page and big blocks; up to twice while much is idle
  Bytes overhang{8u << 20};  // how far a used handle may stand out over the gap it fills
  int max_aliases = 8;       // addresses at which one handle stays mapped, 1 or more
  double slack = 0;          // growth up to peak live x (1 + slack) goes before harvest
  // Small programs are bound by the host and far from any limit, so driver calls cost them most and
  // memory least: this share of the peak of live memory may be reserved on top. Fades out for programs
  // with more than 4 GiB; from cushion_until on there is none, nor on devices (or under caps) of less
  // than four times that.
  double cushion = 0.15;
  Bytes cushion_until{6ull << 30};
  bool recut = true;  // release an idle handle to create the missing piece

  // --- near a known capacity
  double tight_from = 0.7;  // share of the capacity that is reserved, (0, 1]
  double tight_price = 0.65;
  Bytes tight_handle{4u << 20};
  Bytes tight_hit_waste{1u << 20};

  // --- completion of streams: an event is recorded after this much was freed (and at every miss)
  std::uint32_t fence_frees = 64;
  Bytes fence_bytes{32u << 20};    // or a 16th of the peak of live memory, if that is more
  std::uint32_t max_fences = 128;  // events in flight on one stream

  // --- limits
  Bytes cap{~0ull};                     // reserved bytes that this process may hold on the device
  std::uint64_t max_mappings = 500000;  // the driver holds 524,090, then fails
  bool plain = false;                   // ordinary device allocations only, no virtual memory
  bool plain_pools = false;             // the same for private pools only
  bool background = false;              // somebody calls maintain(); else its work is inline

  // The first setting out of its range, in words, or nothing.
  std::optional<std::string> validate() const;
};

}  // namespace gpumemx
