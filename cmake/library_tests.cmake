# SPDX-License-Identifier: BSD-3-Clause
#
# The tests of the C++ library, tests/cpp: all are named cpp/..., and gpumemx_library_tests builds what
# they need. Labels as in tests.cmake; "gpu" needs a device.

add_custom_target(gpumemx_library_tests DEPENDS gpumemx)

# gpumemx_cpp_test(<name> <label> <command>...)
function(gpumemx_cpp_test name label)
  set(launcher "")
  if(label STREQUAL "gpu")
    set(launcher tests/cpp/on_device.sh)
    # A target in the place of the program is replaced by CMake, after a launcher it is not.
    list(POP_FRONT ARGN program)
    if(TARGET ${program})
      set(program "$<TARGET_FILE:${program}>")
    endif()
    list(PREPEND ARGN "${program}")
  endif()
  add_test(NAME cpp/${name} COMMAND ${launcher} ${ARGN} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(cpp/${name} PROPERTIES LABELS ${label} TIMEOUT 600 SKIP_RETURN_CODE 77)
  if(label STREQUAL "gpu")
    # They look at what the driver has free; compiling may go on beside them.
    set_tests_properties(cpp/${name} PROPERTIES RESOURCE_LOCK device)
  endif()
endfunction()

# --- scenarios of the interface: one source, on the simulated device and on the real one

# gpumemx_torch_program(<name> <source> <library>...): with torch's headers and libraries.
function(gpumemx_torch_program name source)
  add_executable(${name} ${source})
  gpumemx_warnings(${name})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_include_directories(${name} SYSTEM PRIVATE ${torch_includes})
  target_link_libraries(${name} PRIVATE ${ARGN})
  gpumemx_link_torch(${name} c10 c10_cuda torch_cpu torch_cuda)
  target_link_options(${name} PRIVATE LINKER:--no-as-needed)  # the layers come after torch
  add_dependencies(gpumemx_library_tests ${name})
endfunction()

# gpumemx_on_testbed(<testbed> <label> <library>...): the scenarios, and how programs end.
function(gpumemx_on_testbed testbed label)
  add_library(cpp_testbed_${testbed} OBJECT tests/cpp/testbed_${testbed}.cpp)
  gpumemx_warnings(cpp_testbed_${testbed})
  target_compile_features(cpp_testbed_${testbed} PUBLIC cxx_std_20)  # as torch's headers ask for
  target_include_directories(cpp_testbed_${testbed} PUBLIC "${PROJECT_SOURCE_DIR}/tests")
  target_include_directories(cpp_testbed_${testbed} SYSTEM PRIVATE ${torch_includes})
  target_link_libraries(cpp_testbed_${testbed} PUBLIC ${ARGN})
  if(gpumemx_catch)
    gpumemx_torch_program(cpp_scenarios_${testbed} $<TARGET_OBJECTS:cpp_scenarios>
      cpp_testbed_${testbed} gpumemx_replay ${gpumemx_catch})
    set(states before installed)
    if(testbed STREQUAL "cuda")
      list(APPEND states torch)  # whose own allocator has no simulated device
    endif()
    foreach(state IN LISTS states)
      gpumemx_cpp_test(scenarios/${testbed}/${state} ${label} cpp_scenarios_${testbed} "[${state}]")
    endforeach()
  endif()
  gpumemx_torch_program(cpp_exit_cases_${testbed} tests/cpp/exit_cases.cpp cpp_testbed_${testbed})
  foreach(case static_tensor thread_local_tensor exit_from_a_thread exit_beside_a_busy_thread
               quick_exit monitor_and_callback_at_exit)
    gpumemx_cpp_test(exit/${testbed}/${case} ${label} cpp_exit_cases_${testbed} ${case})
  endforeach()
endfunction()

include(catch)
set(gpumemx_library_tests "without scenarios: Catch2 not found")
if(gpumemx_catch)
  set(gpumemx_library_tests "scenarios with Catch2 ${Catch2_VERSION}")
  add_library(cpp_scenarios OBJECT tests/cpp/scenarios.cpp)
  gpumemx_warnings(cpp_scenarios)
  target_include_directories(cpp_scenarios PUBLIC "${PROJECT_SOURCE_DIR}/tests" ${public_includes})
  target_link_libraries(cpp_scenarios PRIVATE gpumemx_replay ${gpumemx_catch})
endif()

# c10's inline functions call the CUDA runtime, which the library leaves to torch.
file(GLOB cudart
  "${gpumemx_torch_root}/../nvidia/*/lib/libcudart.so.*" "${gpumemx_torch_root}/lib/libcudart*.so*"
  "${gpumemx_cuda_include}/../lib64/libcudart.so" "${gpumemx_cuda_include}/../lib/libcudart.so")
if(cudart)
  list(GET cudart 0 cudart)
endif()

gpumemx_on_testbed(cuda gpu gpumemx ${cudart})
gpumemx_torch_program(cpp_unload_test tests/cpp/unload_test.cpp gpumemx ${cudart})
target_compile_features(cpp_unload_test PRIVATE cxx_std_20)
gpumemx_cpp_test(unload gpu cpp_unload_test)

# A simulated device is no part of the library, so those programs have the layers in themselves.
if(cudart)
  gpumemx_on_testbed(sim none gpumemx_api "${cudart}")

  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/unit/adapter/*.cpp")
  gpumemx_torch_program(gpumemx_unit_adapter "${sources}" gpumemx_adapter "${cudart}" GTest::gtest_main)
  target_compile_definitions(gpumemx_unit_adapter PRIVATE GPUMEMX_TORCH_ROOT="${gpumemx_torch_root}")
  gpumemx_discover(gpumemx_unit_adapter none)
else()
  string(APPEND gpumemx_library_tests ", nothing on the simulated device: no libcudart found")
endif()

add_executable(cpp_two_copies_test tests/cpp/two_copies_test.cpp)
gpumemx_warnings(cpp_two_copies_test)
target_link_libraries(cpp_two_copies_test PRIVATE gpumemx ${CMAKE_DL_LIBS})
add_custom_command(TARGET cpp_two_copies_test POST_BUILD VERBATIM
  COMMAND "${CMAKE_COMMAND}" -E copy $<TARGET_FILE:gpumemx> "${PROJECT_BINARY_DIR}/libgpumemx_copy.so")
add_dependencies(gpumemx_library_tests cpp_two_copies_test)
gpumemx_cpp_test(two_copies none cpp_two_copies_test "${PROJECT_BINARY_DIR}/libgpumemx_copy.so")

# --- every public header alone, as C++17, by each compiler that is there

file(GLOB headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/csrc/include"
  "${PROJECT_SOURCE_DIR}/csrc/include/gpumemx/*.hpp")
list(APPEND headers gpumemx/version.hpp)
find_program(GPUMEMX_GXX g++)
find_program(GPUMEMX_CLANGXX NAMES clang++ clang++-18 clang++-17 clang++-16 clang++-15 clang++-14)
mark_as_advanced(GPUMEMX_GXX GPUMEMX_CLANGXX)
foreach(compiler gxx clangxx)
  string(TOUPPER ${compiler} variable)
  if(NOT GPUMEMX_${variable})
    continue()
  endif()
  foreach(header IN LISTS headers)
    string(REGEX REPLACE ".*/|\\.hpp" "" name "${header}")
    # Twice: a header must also bear being included again.
    set(source "${PROJECT_BINARY_DIR}/generated/header_${name}.cpp")
    file(CONFIGURE OUTPUT "${source}" CONTENT "#include <${header}>\n#include <${header}>\n")
    gpumemx_cpp_test(header/${compiler}/${name} none
      "${GPUMEMX_${variable}}" -std=c++17 -fsyntax-only -Wall -Wextra -Wpedantic -Wconversion -Wshadow
      -Werror "-I${PROJECT_SOURCE_DIR}/csrc/include" "-I${PROJECT_BINARY_DIR}/include" "${source}")
  endforeach()
endforeach()

# --- what is installed, and programs that use it from there

set(prefix "${PROJECT_BINARY_DIR}/prefix")
gpumemx_cpp_test(install none
  "${CMAKE_COMMAND}" --install "${PROJECT_BINARY_DIR}" --component cpp --prefix "${prefix}")
set_tests_properties(cpp/install PROPERTIES FIXTURES_SETUP prefix)

# gpumemx_consumer(<name> <label> <project> <test command> <cmake argument>...): configures, builds and
# runs a project of its own.
function(gpumemx_consumer name label project test)
  separate_arguments(test)
  gpumemx_cpp_test(${name} ${label} "${CMAKE_CTEST_COMMAND}"
    --build-and-test "${PROJECT_SOURCE_DIR}/${project}" "${PROJECT_BINARY_DIR}/${name}"
    --build-generator "${CMAKE_GENERATOR}" --build-makeprogram "${CMAKE_MAKE_PROGRAM}"
    --build-options "-DCMAKE_BUILD_TYPE=Release" ${ARGN}
    --test-command ${test})
  set_tests_properties(cpp/${name} PROPERTIES FIXTURES_REQUIRED prefix)
endfunction()

foreach(compiler gxx clangxx)
  string(TOUPPER ${compiler} variable)
  if(GPUMEMX_${variable})
    gpumemx_consumer(consumer/${compiler} none tests/cpp/consumer "consumer"
      "-DCMAKE_CXX_COMPILER=${GPUMEMX_${variable}}" "-DCMAKE_PREFIX_PATH=${prefix}")
  endif()
endforeach()

if(GPUMEMX_GXX)
  gpumemx_consumer(consumer/trimmed_toolchain none tests/cpp/consumer
    "${PROJECT_SOURCE_DIR}/tests/cpp/one_libstdcxx.sh ./consumer"
    "-DCMAKE_CXX_COMPILER=${PROJECT_SOURCE_DIR}/tests/cpp/trimmed_gxx.sh" "-DCMAKE_PREFIX_PATH=${prefix}")
endif()

# In another's build it has to configure; that it compiles is known from here.
gpumemx_cpp_test(consumer/subdirectory none "${CMAKE_COMMAND}"
  -S "${PROJECT_SOURCE_DIR}/tests/cpp/consumer" -B "${PROJECT_BINARY_DIR}/consumer/subdirectory"
  -G "${CMAKE_GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}"
  "-DGPUMEMX_SOURCE_DIR=${PROJECT_SOURCE_DIR}" "-DGPUMEMX_TORCH_ROOT=${gpumemx_torch_root}"
  "-DPython_EXECUTABLE=${Python_EXECUTABLE}")

# Another minor release of torch is refused when the package is looked for.
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/other_torch/include/torch/version.h"
  CONTENT "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 3\n")
file(WRITE "${PROJECT_BINARY_DIR}/other_torch/lib/libc10_cuda.so" "")
gpumemx_cpp_test(consumer/other_torch none "${CMAKE_COMMAND}"
  -S "${PROJECT_SOURCE_DIR}/tests/cpp/consumer" -B "${PROJECT_BINARY_DIR}/consumer/other_torch"
  -G "${CMAKE_GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}"
  "-DCMAKE_PREFIX_PATH=${prefix}" "-DGPUMEMX_TORCH_ROOT=${PROJECT_BINARY_DIR}/other_torch")
set_tests_properties(cpp/consumer/other_torch PROPERTIES
  FIXTURES_REQUIRED prefix PASS_REGULAR_EXPRESSION "and the torch[ \n]+in[ \n]+[^ ]+other_torch[ \n]+is[ \n]+2.3")

find_program(GPUMEMX_PKG_CONFIG NAMES pkg-config pkgconf)
mark_as_advanced(GPUMEMX_PKG_CONFIG)
if(GPUMEMX_PKG_CONFIG AND GPUMEMX_GXX)
  gpumemx_cpp_test(consumer/pkg_config none tests/cpp/pkg_config.sh
    "${GPUMEMX_PKG_CONFIG}" "${GPUMEMX_GXX}" "${prefix}/${CMAKE_INSTALL_LIBDIR}/pkgconfig"
    ${PROJECT_VERSION} "${PROJECT_BINARY_DIR}/consumer/pkg_config")
  set_tests_properties(cpp/consumer/pkg_config PROPERTIES FIXTURES_REQUIRED prefix)
endif()

# --- the examples, built from the installed package: here they run on the CPU, where there is no device

gpumemx_cpp_test(examples/configure none "${CMAKE_COMMAND}"
  -S "${PROJECT_SOURCE_DIR}/examples/cpp" -B "${PROJECT_BINARY_DIR}/examples/cpp"
  -G "${CMAKE_GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}"
  "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" "-DCMAKE_PREFIX_PATH=${prefix}"
  "-DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER}"
  # Nobody looks at how fast they are here, and torch's headers take long to optimize.
  "-DCMAKE_CXX_FLAGS_RELEASE=-O1")
set_tests_properties(cpp/examples/configure PROPERTIES
  FIXTURES_REQUIRED prefix FIXTURES_SETUP examples_configured)
gpumemx_cpp_test(examples/build none "${CMAKE_COMMAND}" --build "${PROJECT_BINARY_DIR}/examples/cpp" -j)
set_tests_properties(cpp/examples/build PROPERTIES
  FIXTURES_REQUIRED examples_configured FIXTURES_SETUP examples)

foreach(where cpu gpu)
  set(folder "${PROJECT_BINARY_DIR}/examples/cpp")
  if(where STREQUAL "cpu")
    gpumemx_cpp_test(examples/cpu/train none
      tests/cpp/same_losses.sh "${folder}/train_transformer" --cpu --steps 30)
    # One thread: beside other tests, torch's threads mostly wait for each other.
    set_tests_properties(cpp/examples/cpu/train PROPERTIES ENVIRONMENT OMP_NUM_THREADS=1)
    gpumemx_cpp_test(examples/cpu/serve none "${folder}/inference_server" --cpu)
  else()
    gpumemx_cpp_test(examples/gpu/train gpu tests/cpp/same_losses.sh "${folder}/train_transformer")
    gpumemx_cpp_test(examples/gpu/serve gpu "${folder}/inference_server")
  endif()
  set_tests_properties(cpp/examples/${where}/train cpp/examples/${where}/serve PROPERTIES
    FIXTURES_REQUIRED examples)
endforeach()
