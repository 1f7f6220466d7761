// SPDX-License-Identifier: BSD-3-Clause
//
// Which torch this process runs with, for code that is not chosen by one that knows. Python loads the
// module for the torch that is there; a C++ library is linked with whatever the loader finds, and one
// for another minor release would call torch's allocator by the wrong slots.
#pragma once

#include <optional>
#include <string>

namespace gpumemx::adapter {

// The release that a torch's folder (with include/ and lib/) holds, "2.14", or "" when it does not say.
std::string torch_release_in(const std::string& folder);

// One sentence when the torch that is loaded is of another minor release than this was built for.
// Nothing when it is the same, or cannot be told: headers and libraries need not stand side by side.
std::optional<std::string> other_torch();

}  // namespace gpumemx::adapter
