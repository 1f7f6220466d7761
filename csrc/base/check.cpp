// SPDX-License-Identifier: BSD-3-Clause
#include "base/check.hpp"

#include <cstdio>
#include <cstdlib>

namespace gpumemx {

void check_failed(const char* what, const char* condition, const char* file, int line) {
  std::fprintf(stderr, "gpumemx: %s [%s failed at %s:%d]\n", what, condition, file, line);
  std::fflush(stderr);
  std::abort();
}

}  // namespace gpumemx
