# SPDX-License-Identifier: BSD-3-Clause
#
# Catch2 2.13 (one header, we compile its main) or 3 (a library that brings its own). Sets gpumemx_catch,
# what a program links that includes "support/catch.hpp" (benchmarks too), empty without Catch2.

set(gpumemx_catch "")
find_package(Catch2 QUIET)
if(TARGET Catch2::Catch2)
  set(gpumemx_catch Catch2::Catch2WithMain)
  if(Catch2_VERSION VERSION_LESS 3)
    # Not 2.13's own Catch2WithMain, which some packages bring: it cannot run benchmarks.
    set(gpumemx_catch gpumemx_catch_main)
    if(NOT TARGET gpumemx_catch_main)
      add_library(gpumemx_catch_main STATIC "${PROJECT_SOURCE_DIR}/tests/support/catch_main.cpp")
      target_compile_features(gpumemx_catch_main PUBLIC cxx_std_20)
      target_compile_definitions(gpumemx_catch_main PUBLIC CATCH_CONFIG_ENABLE_BENCHMARKING)
      target_link_libraries(gpumemx_catch_main PUBLIC Catch2::Catch2)
    endif()
  endif()
endif()
