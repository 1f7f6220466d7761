# SPDX-License-Identifier: BSD-3-Clause
#
# Which torch the adapter is built for: that of the given Python, read from its files, since importing
# it takes seconds. GPUMEMX_TORCH_ROOT (a folder with include/ and lib/, as in a wheel) overrides it;
# without the Python extension, so do the usual names of a LibTorch (find_torch_root.cmake).
#
# Sets gpumemx_torch_version and gpumemx_torch_cuda, empty when there is none; gpumemx_torch_root;
# and gpumemx_torch_missing: why the adapter can't be built, or empty.

set(gpumemx_torch_version "")
set(gpumemx_torch_cuda "")
set(gpumemx_torch_root "")
set(gpumemx_torch_missing "no torch in the build's Python")
set(GPUMEMX_TORCH_ROOT "" CACHE PATH "torch to build the adapter for; default: that of the Python")

include(find_torch_root)
if(GPUMEMX_TORCH_ROOT)
  set(gpumemx_torch_root "${GPUMEMX_TORCH_ROOT}")
  set(gpumemx_torch_cuda "given")
elseif(NOT GPUMEMX_BUILD_PYTHON)
  gpumemx_find_torch_root(gpumemx_torch_root PYTHON "${Python_EXECUTABLE}")
  gpumemx_torch_release(gpumemx_torch_version "${gpumemx_torch_root}")
  set(gpumemx_torch_missing "no torch with CUDA (set CMAKE_PREFIX_PATH to a LibTorch, or GPUMEMX_TORCH_ROOT)")
elseif(Python_EXECUTABLE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/find_torch.py"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(LENGTH found fields)
  if(fields EQUAL 3)
    list(GET found 0 gpumemx_torch_version)
    list(GET found 1 gpumemx_torch_cuda)
    list(GET found 2 gpumemx_torch_root)
  endif()
endif()

if(gpumemx_torch_root)
  gpumemx_torch_release(release "${gpumemx_torch_root}")
  if(release MATCHES "^([0-9]+)\\.([0-9]+)$")
    set(gpumemx_torch_major "${CMAKE_MATCH_1}")
    set(gpumemx_torch_minor "${CMAKE_MATCH_2}")
  endif()
  set(gpumemx_torch_missing "")
  if(NOT EXISTS "${gpumemx_torch_root}/include/c10/cuda/CUDACachingAllocator.h"
     OR gpumemx_torch_cuda STREQUAL "none")
    set(gpumemx_torch_missing "torch ${gpumemx_torch_version} is built without CUDA")
  elseif("${gpumemx_torch_major}.${gpumemx_torch_minor}" VERSION_LESS 2.11)
    set(gpumemx_torch_missing "torch ${gpumemx_torch_version} is older than 2.11")
  elseif(NOT gpumemx_cuda_include)
    set(gpumemx_torch_missing "torch is there, but no cuda.h (set CUDA_HOME)")
  endif()
endif()
