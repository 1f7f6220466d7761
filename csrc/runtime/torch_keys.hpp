// SPDX-License-Identifier: BSD-3-Clause
//
// The keys of torch's own allocator settings, and what is left of each under gpumemx.
#pragma once

#include <optional>
#include <string_view>

namespace gpumemx {

// One sentence that begins with "kept:", "torch's own:", "not in this version:" or "no work left:".
// Nothing for a key that torch 2.11 to 2.15 do not have.
std::optional<std::string_view> torch_note(std::string_view key);

}  // namespace gpumemx
