// SPDX-License-Identifier: BSD-3-Clause
//
// Catch2, whichever the machine has: 3 (a library, many headers) or 2.13 (one header). Include this
// and write tests and benchmarks as usual; the build brings main() for both.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
