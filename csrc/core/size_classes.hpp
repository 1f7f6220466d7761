// SPDX-License-Identifier: BSD-3-Clause
//
// Sizes: the granule that blocks are made of, the page that memory is mapped by, which heap a block
// goes to, and the bins that free blocks are found by. Pure functions.
#pragma once

#include <bit>
#include <cstdint>

#include "base/units.hpp"

namespace gpumemx {

struct Options;

inline constexpr Bytes kGranule{512};    // block sizes and addresses are multiples, as torch's
inline constexpr Bytes kPage{2u << 20};  // the device's granularity of mapping
inline constexpr Bytes kMaxHandle{64u << 20};
inline constexpr std::uint32_t kMaxHandlePages = 32;
inline constexpr Bytes kTorchSmall{1u << 20};  // torch's statistics call blocks up to here small

// What a heap holds. What goes to which heap decides the waste (docs/design.md, "Heaps").
enum class HeapKind : std::uint8_t {
  kSmall,       // blocks up to Options::small_limit
  kPages,       // exact multiples of 2 MiB, page-aligned: weights, gradients, optimizer states
  kBig,         // other blocks from Options::big_from
  kRest,        // all others
  kPlainSmall,  // plain mode: segments of ordinary device allocations
  kPlainLarge,
};
inline constexpr int kHeapKinds = 6;

constexpr bool is_plain(HeapKind kind) { return kind >= HeapKind::kPlainSmall; }
constexpr bool is_small(HeapKind kind) {
  return kind == HeapKind::kSmall || kind == HeapKind::kPlainSmall;
}
// Heaps whose blocks cover their handles nearly whole.
constexpr bool fills_pages(HeapKind kind) {
  return kind == HeapKind::kPages || kind == HeapKind::kBig;
}

// A request of `size` bytes takes a block of this size: whole granules, at least one.
// REQUIRES: size <= kMaxRequest.
constexpr Bytes block_size(Bytes size) { return size.n == 0 ? kGranule : round_up(size, kGranule); }
// Larger requests are refused before any arithmetic on them can overflow; torch refuses them too.
inline constexpr Bytes kMaxRequest{1ull << 60};

HeapKind heap_kind(Bytes block, bool plain, const Options& options);

// Plain mode: how much to ask the device for when no free block holds `block`. Never more than
// torch's own steps: 2 MiB for small blocks, 20 MiB below 10 MiB, else whole pages.
Bytes plain_segment_size(Bytes block, HeapKind kind);

// Bins of free blocks: exact below 32 granules, then 32 to an octave, so sizes in one bin differ by
// at most 1/32. bin_of is monotone.
inline constexpr std::uint32_t kBinsPerOctave = 32;
inline constexpr std::uint32_t kBins = 32 * (64 - 9 - 4);  // covers any 64-bit size in granules

constexpr std::uint32_t bin_of(Bytes size) {
  const std::uint64_t granules = size.n / kGranule.n;
  if (granules < kBinsPerOctave) return static_cast<std::uint32_t>(granules);
  const int log = 63 - std::countl_zero(granules);
  return static_cast<std::uint32_t>(log - 4) * kBinsPerOctave +
         static_cast<std::uint32_t>((granules >> (log - 5)) & (kBinsPerOctave - 1));
}

// The largest power of two of bytes that is at most `size`, but at least one page.
constexpr Bytes pow2_pages_below(Bytes size) {
  return size <= kPage ? kPage : Bytes{std::bit_floor(size.n)};
}

}  // namespace gpumemx
