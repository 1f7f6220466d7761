// SPDX-License-Identifier: BSD-3-Clause
//
// What two threads write to at the same time lies at least this far apart.
#pragma once

#include <cstddef>

namespace gpumemx {

// Not std::hardware_destructive_interference_size: it may differ between translation units.
inline constexpr std::size_t kCacheLine = 64;

}  // namespace gpumemx
