// SPDX-License-Identifier: BSD-3-Clause
#include "core/size_classes.hpp"

#include "core/options.hpp"

namespace gpumemx {

HeapKind heap_kind(Bytes block, bool plain, const Options& options) {
  const bool small = block <= options.small_limit;
  if (plain) return small ? HeapKind::kPlainSmall : HeapKind::kPlainLarge;
  if (small) return HeapKind::kSmall;
  if (block.n % kPage.n == 0) return HeapKind::kPages;
  return block >= options.big_from ? HeapKind::kBig : HeapKind::kRest;
}

Bytes plain_segment_size(Bytes block, HeapKind kind) {
  constexpr Bytes kMediumSegment{20u << 20};
  constexpr Bytes kMediumLimit{10u << 20};
  if (kind == HeapKind::kPlainSmall) return kPage;
  return block < kMediumLimit ? kMediumSegment : round_up(block, kPage);
}

}  // namespace gpumemx
