// SPDX-License-Identifier: BSD-3-Clause
//
// Three strengths of check, named for what they cost.
//
//   GPUMEMX_CHECK        always on. For what would corrupt a user's tensor if it were false.
//   GPUMEMX_ASSERT       debug builds. O(1), no lock, no driver call.
//   GPUMEMX_ASSERT_SLOW  -DGPUMEMX_PARANOID=ON. O(n) walks such as validate().
//
// The condition of the last two must have no side effect: release builds never evaluate it.
#pragma once

namespace gpumemx {

// Prints one line to stderr and aborts. `what` says which rule was broken, in words for a person.
[[noreturn]] void check_failed(const char* what, const char* condition, const char* file, int line);

}  // namespace gpumemx

#define GPUMEMX_CHECK(condition, what) \
  ((condition) ? (void)0 : ::gpumemx::check_failed(what, #condition, __FILE__, __LINE__))

#ifdef NDEBUG
#define GPUMEMX_ASSERT(condition, what) ((void)0)
#else
#define GPUMEMX_ASSERT(condition, what) GPUMEMX_CHECK(condition, what)
#endif

#ifdef GPUMEMX_PARANOID
#define GPUMEMX_ASSERT_SLOW(condition, what) GPUMEMX_CHECK(condition, what)
#else
#define GPUMEMX_ASSERT_SLOW(condition, what) ((void)0)
#endif
