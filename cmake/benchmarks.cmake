# SPDX-License-Identifier: BSD-3-Clause
#
# benchmarks/*.cpp, one program each, with Catch2. Run by hand: benchmarks/README.md.

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/benchmarks/*.cpp")
include(catch)
set(gpumemx_benchmarks "left out: Catch2 not found (package catch2)")
if(gpumemx_catch AND sources)
  set(gpumemx_benchmarks "in (Catch2 ${Catch2_VERSION})")
  foreach(source IN LISTS sources)
    cmake_path(GET source STEM name)
    add_executable(${name} "${source}")
    gpumemx_warnings(${name})
    target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
    target_compile_definitions(${name} PRIVATE GPUMEMX_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    target_link_libraries(${name} PRIVATE gpumemx_replay gpumemx_core ${gpumemx_catch})
  endforeach()
elseif(gpumemx_catch)
  set(gpumemx_benchmarks "left out: no source in benchmarks/")
endif()
