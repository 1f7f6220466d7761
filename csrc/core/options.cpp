// SPDX-License-Identifier: BSD-3-Clause
#include "core/options.hpp"

#include <bit>

#include "core/size_classes.hpp"

namespace gpumemx {

std::optional<std::string> Options::validate() const {
  const struct {
    const char* name;
    Bytes value;
  } handles[] = {{"small_handle", small_handle},       {"rest_handle", rest_handle},
                 {"rest_handle_max", rest_handle_max}, {"big_handle", big_handle},
                 {"big_handle_max", big_handle_max},   {"tight_handle", tight_handle}};
  for (const auto& [name, value] : handles) {
    if (!std::has_single_bit(value.n) || value < kPage || value > kMaxHandle) {
      return std::string(name) + " must be a power of two from 2 MiB to 64 MiB";
    }
  }
  if (rest_handle_max < rest_handle) return "rest_handle_max must be at least rest_handle";
  if (big_handle_max < big_handle) return "big_handle_max must be at least big_handle";
  if (small_limit < kGranule || small_limit > kPage) {
    return "small_limit must be from 512 B to 2 MiB";
  }
  if (hit_scan < 1) return "hit_scan must be 1 or more";
  if (miss_runs < 0 || miss_extents < 0) return "miss_runs and miss_extents must not be negative";
  if (miss_tries < 1) return "miss_tries must be 1 or more";
  if (max_aliases < 1) return "max_aliases must be 1 or more";
  if (price < 0 || price_pages < 0 || tight_price < 0) return "prices must not be negative";
  if (slack < 0 || slack > 1) return "slack must be from 0 to 1";
  if (cushion < 0 || cushion > 1) return "cushion must be from 0 to 1";
  if (tight_from <= 0 || tight_from > 1) return "tight_from must be above 0 and at most 1";
  if (fence_frees < 1 || max_fences < 1) return "fence_frees and max_fences must be 1 or more";
  return std::nullopt;
}

}  // namespace gpumemx
