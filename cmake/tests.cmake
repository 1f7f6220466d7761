# SPDX-License-Identifier: BSD-3-Clause
#
# The test executables. A file in one of the test folders is in that folder's executable; a new file
# needs no line here. Each test gets one label, from its name:
#
#   gpu      "Cuda" in the name: needs a device. Skipped without one; GPUMEMX_REQUIRE_GPU=1 makes
#            that a failure.
#   threads  "Thread" in the name, and all of tests/stress: what the thread sanitizer is run on.
#   property the random programs, each executable one test.
#   none     every other test: needs nothing but the machine it is built on.

include(GoogleTest)

find_package(GTest QUIET)
if(NOT TARGET GTest::gtest_main)
  # Some distributions ship the sources only.
  if(EXISTS /usr/src/googletest/CMakeLists.txt)
    set(INSTALL_GTEST OFF)
    set(BUILD_GMOCK OFF)
    add_subdirectory(/usr/src/googletest "${PROJECT_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL)
    if(NOT TARGET GTest::gtest_main)
      add_library(GTest::gtest_main ALIAS gtest_main)
    endif()
    set(gpumemx_gtest "from /usr/src/googletest")
  else()
    message(FATAL_ERROR "GoogleTest is missing: install libgtest-dev (Debian, Ubuntu), or configure "
                        "with -DGPUMEMX_BUILD_TESTS=OFF")
  endif()
else()
  set(gpumemx_gtest "GoogleTest ${GTest_VERSION}")
endif()

# What several test programs share: tests/support is on the include path as support/.
function(gpumemx_test_program name)
  cmake_parse_arguments(T "" "" "SOURCES;USES" ${ARGN})
  add_executable(${name} ${T_SOURCES})
  gpumemx_warnings(${name})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_compile_definitions(${name} PRIVATE GPUMEMX_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${T_USES} GTest::gtest_main Threads::Threads)
endfunction()

# Registers the tests of an executable, each with the label that its name asks for. They are listed
# when ctest runs, not when the executable is built.
function(gpumemx_discover name plain_label)
  set(labels gpu threads ${plain_label})
  set(filters "*Cuda*" "*Thread*-*Cuda*" "-*Cuda*:*Thread*")
  foreach(label filter IN ZIP_LISTS labels filters)
    gtest_discover_tests(${name}
      TEST_PREFIX "${name}/" TEST_FILTER "${filter}" DISCOVERY_MODE PRE_TEST
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" PROPERTIES LABELS ${label} TIMEOUT 600)
  endforeach()
endfunction()

# gpumemx_test_folder(<executable> <folder of tests/> <label> <library>...)
function(gpumemx_test_folder name folder label)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/${folder}/*.cpp")
  if(NOT sources)
    return()
  endif()
  gpumemx_test_program(${name} SOURCES ${sources} USES ${ARGN})
  gpumemx_discover(${name} ${label})
endfunction()

gpumemx_test_folder(gpumemx_unit_base unit/base none gpumemx_base)
gpumemx_test_folder(gpumemx_unit_driver unit/driver none gpumemx_driver)
gpumemx_test_folder(gpumemx_unit_core unit/core none gpumemx_core)
gpumemx_test_folder(gpumemx_unit_replay unit/replay none gpumemx_replay)
gpumemx_test_folder(gpumemx_unit_monitor unit/monitor none gpumemx_monitor)
gpumemx_test_folder(gpumemx_unit_runtime unit/runtime none gpumemx_runtime)
gpumemx_test_folder(contract contract none gpumemx_driver)
if(gpumemx_cuda_include)
  target_include_directories(contract SYSTEM PRIVATE "${gpumemx_cuda_include}")
endif()
gpumemx_test_folder(regression regression none gpumemx_replay)
gpumemx_test_folder(stress stress threads gpumemx_replay gpumemx_runtime)
gpumemx_test_folder(gpu gpu gpu gpumemx_core)
if(gpumemx_cuda_include AND TARGET gpu)
  target_include_directories(gpu SYSTEM PRIVATE "${gpumemx_cuda_include}")
endif()

# Random programs: one executable a file, and one test an executable, since what a run counts is
# printed and checked over all of its programs.
function(gpumemx_property_test name)
  gpumemx_test_program(${name} ${ARGN})
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(${name} PROPERTIES LABELS property TIMEOUT 3600)
endfunction()

# The core with faults in it, each switched on by name: the random programs must catch every one.
# Not under coverage, where the same files would be counted twice.
if(NOT GPUMEMX_COVERAGE)
  set(planted_sources ${gpumemx_core_sources})
  list(TRANSFORM planted_sources PREPEND "${PROJECT_SOURCE_DIR}/")
  add_library(gpumemx_core_planted STATIC ${planted_sources})
  gpumemx_warnings(gpumemx_core_planted)
  target_include_directories(gpumemx_core_planted PUBLIC "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_definitions(gpumemx_core_planted PUBLIC GPUMEMX_PLANTED_FAULTS)
  target_link_libraries(gpumemx_core_planted PUBLIC gpumemx_driver gpumemx_base)
endif()

file(GLOB property CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/property/*.cpp")
foreach(source IN LISTS property)
  cmake_path(GET source STEM name)
  gpumemx_property_test(${name} SOURCES "${source}" USES gpumemx_replay)
  if(name STREQUAL "random_programs" AND TARGET gpumemx_core_planted)
    gpumemx_property_test(planted_faults SOURCES "${source}" USES gpumemx_core_planted)
  endif()
endforeach()
