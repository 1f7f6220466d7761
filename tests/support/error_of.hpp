// SPDX-License-Identifier: BSD-3-Clause
//
// The code of a Result that a test expects to have failed; nothing when it did not, so that the
// test fails and does not crash.
#pragma once

#include <optional>

#include "base/result.hpp"

namespace gpumemx {

template <class T>
std::optional<Errc> error_of(const Result<T>& result) {
  return result.ok() ? std::nullopt : std::optional<Errc>(result.error().code);
}

}  // namespace gpumemx
