// SPDX-License-Identifier: BSD-3-Clause
//
// The settings of torch's own CUDA allocator that change what memory it holds, with the names,
// limits and defaults that PYTORCH_ALLOC_CONF has in torch 2.11.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/units.hpp"

namespace gpumemx {

struct TorchOptions {
  // Of powers of two from 1 MiB on; the first is for all that is smaller, the last for all that is
  // larger.
  static constexpr std::size_t kIntervals = 16;
  static constexpr Bytes kNoLimit{~0ull};

  bool expandable_segments = false;
  Bytes max_split_size = kNoLimit;          // blocks from here on are neither cut nor shared
  Bytes max_non_split_rounding = 20_MiB;    // by how much such a block may be too large
  Bytes large_segment_size = 20_MiB;        // of segments for 1 to 10 MiB
  double garbage_collection_threshold = 0;  // share of the capacity; 0: none
  std::array<std::uint64_t, kIntervals> roundup_power2_divisions{};  // 0, 1: round to 512 B

  static std::span<const std::string_view> keys();
  // Sets one; `value` as PYTORCH_ALLOC_CONF has it, in lower case and without spaces. Returns what is wrong with it in one sentence, or nothing.
  std::optional<std::string> set(std::string_view key, std::string_view value);
  // What is wrong with several together, or nothing.
  std::optional<std::string> validate() const;

  // 0 bytes are asked for as 1.
  Bytes rounded(Bytes size) const;
};

}  // namespace gpumemx
