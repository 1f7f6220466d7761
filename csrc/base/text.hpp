// SPDX-License-Identifier: BSD-3-Clause
//
// How figures are written. One function each, so that every report says 1.5 GiB the same way.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/units.hpp"

namespace gpumemx {

// Binary units with two decimals from KiB on: "512 B", "1.50 GiB".
std::string format_bytes(Bytes size);

// "24GiB", "1.5 GiB", "512MiB", "24G", "1000000" (bytes); case and spaces do not matter, and k, M, G,
// T, with or without iB or B, are powers of 1024. Nothing when the text is not a size or overflows.
std::optional<Bytes> parse_bytes(std::string_view text);

}  // namespace gpumemx
