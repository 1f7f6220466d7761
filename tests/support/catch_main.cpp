// SPDX-License-Identifier: BSD-3-Clause
//
// main() for Catch2 2.13, compiled once for all programs that use it. Catch2 3 has its own.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
