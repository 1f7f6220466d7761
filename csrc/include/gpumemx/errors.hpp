// SPDX-License-Identifier: BSD-3-Clause
//
// What the functions of this library throw besides the standard's own exceptions.
#pragma once

#include <gpumemx/export.hpp>
#include <stdexcept>

namespace gpumemx {

/// gpumemx cannot become torch's allocator in this process; the text says why and what to do.
class GPUMEMX_API InstallError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A setting does not exist (the text names the nearest) or has a wrong value, wherever it was set; or
/// an environment variable GPUMEMX_... means nothing.
class GPUMEMX_API SettingError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace gpumemx
