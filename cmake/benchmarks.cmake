# SPDX-License-Identifier: BSD-3-Clause
#
# benchmarks/*.cpp, one program each, with Catch2 2.13 (one header, we compile its main) or 3 (a
# library that brings its own). Run by hand: benchmarks/README.md.

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/benchmarks/*.cpp")
find_package(Catch2 QUIET)
set(gpumemx_benchmarks "left out: Catch2 not found (package catch2)")
if(TARGET Catch2::Catch2 AND sources)
  set(gpumemx_benchmarks "in (Catch2 ${Catch2_VERSION})")
  set(catch Catch2::Catch2WithMain)
  if(Catch2_VERSION VERSION_LESS 3)
    # Not 2.13's own Catch2WithMain, which some packages bring: it cannot run benchmarks.
    set(catch gpumemx_catch_main)
    add_library(${catch} STATIC "${PROJECT_SOURCE_DIR}/tests/support/catch_main.cpp")
    target_compile_features(${catch} PUBLIC cxx_std_20)
    target_compile_definitions(${catch} PUBLIC CATCH_CONFIG_ENABLE_BENCHMARKING)
    target_link_libraries(${catch} PUBLIC Catch2::Catch2)
  endif()
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    add_executable(${name} "${source}")
    gpumemx_warnings(${name})
    target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
    target_compile_definitions(${name} PRIVATE GPUMEMX_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    target_link_libraries(${name} PRIVATE gpumemx_replay gpumemx_core ${catch})
  endforeach()
elseif(TARGET Catch2::Catch2)
  set(gpumemx_benchmarks "left out: no source in benchmarks/")
endif()
