# SPDX-License-Identifier: BSD-3-Clause
#
# gpumemx_find_torch_root(<variable> [DEFAULT <root>] [PYTHON <python>]): the folder of a torch with CUDA
# that has include/ and lib/, of a wheel or of a downloaded LibTorch, or "" when there is none. Looked at
# in this order: what the user named, the default, what the Python has.
#
# gpumemx_torch_release(<variable> <root>): its release, "2.14", or "".
#
# Not by find_package(Torch): that wants nvcc and, from CUDA 13 on, a CMake that is newer than some
# systems', neither of which is needed to use torch. Part of the installed package too.

function(gpumemx_find_torch_root variable)
  cmake_parse_arguments(T "" "DEFAULT;PYTHON" "" ${ARGN})
  set(candidates "")
  foreach(name GPUMEMX_TORCH_ROOT TORCH_INSTALL_PREFIX Torch_ROOT LIBTORCH)
    list(APPEND candidates ${${name}} $ENV{${name}})
  endforeach()
  if(Torch_DIR)  # <root>/share/cmake/Torch
    list(APPEND candidates "${Torch_DIR}/../../..")
  endif()
  string(REPLACE ":" ";" from_environment "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH from_environment)
    # torch.utils.cmake_prefix_path is <root>/share/cmake.
    list(APPEND candidates "${prefix}" "${prefix}/../..")
  endforeach()
  list(APPEND candidates ${T_DEFAULT})
  set(found "")
  foreach(candidate IN LISTS candidates)
    if(NOT found AND EXISTS "${candidate}/lib/libc10_cuda.so")
      get_filename_component(found "${candidate}" REALPATH)
    endif()
  endforeach()
  if(NOT found)
    if(NOT T_PYTHON)
      set(T_PYTHON python3)
    endif()
    execute_process(
      COMMAND "${T_PYTHON}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/find_torch.py"
      OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(LENGTH answer fields)
    if(fields EQUAL 3)
      list(GET answer 2 root)
      if(EXISTS "${root}/lib/libc10_cuda.so")
        set(found "${root}")
      endif()
    endif()
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

function(gpumemx_torch_release variable root)
  set(header "${root}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${header}")
    set(header "${root}/include/torch/version.h")
  endif()
  set(release "")
  if(EXISTS "${header}")
    file(READ "${header}" text)
    string(REGEX MATCH "TORCH_VERSION_MAJOR ([0-9]+)" major "${text}")
    set(major "${CMAKE_MATCH_1}")
    string(REGEX MATCH "TORCH_VERSION_MINOR ([0-9]+)" minor "${text}")
    set(release "${major}.${CMAKE_MATCH_1}")
  endif()
  set(${variable} "${release}" PARENT_SCOPE)
endfunction()
