# SPDX-License-Identifier: BSD-3-Clause
#
# gpumemx_warnings(<target>)            our warnings, as errors; for our own code only
# gpumemx_layer(<name> [USES <layer>...] [SOURCES <file>...])
#
# One static library a layer, gpumemx_<name>. Every csrc/<name>/*.cpp is in it: a new file needs no
# line here. SOURCES adds files of subfolders, for layers where it depends on the machine what is in.
# A layer links only what it USES, so a call upwards does not link; tools/check_layers.py says the
# same about includes. A layer of headers only is an INTERFACE library.

function(gpumemx_warnings target)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wpedantic -Wconversion -Wshadow
    $<$<BOOL:${GPUMEMX_WERROR}>:-Werror>
    # g++ 12 and 13 see overlapping copies in std::string's operator+ (GCC bug 105651).
    $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,14>>:-Wno-restrict>
    # g++'s -Wconversion means no signs in C++, clang's does.
    "$<$<CXX_COMPILER_ID:Clang,AppleClang>:-Wthread-safety;-Wno-sign-conversion>")
endfunction()

function(gpumemx_layer name)
  cmake_parse_arguments(L "" "" "SOURCES;USES" ${ARGN})
  file(GLOB own CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}"
       "${PROJECT_SOURCE_DIR}/csrc/${name}/*.cpp")
  set(sources ${own} ${L_SOURCES})
  set(target gpumemx_${name})
  if(sources)
    add_library(${target} STATIC ${sources})
    set(scope PUBLIC)
    gpumemx_warnings(${target})
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_compile_features(${target} ${scope} cxx_std_20)
  target_include_directories(${target} ${scope}
    "${PROJECT_SOURCE_DIR}/csrc" "${PROJECT_BINARY_DIR}/generated")
  foreach(below IN LISTS L_USES)
    target_link_libraries(${target} ${scope} gpumemx_${below})
  endforeach()
  set(gpumemx_${name}_sources ${sources} PARENT_SCOPE)
endfunction()
