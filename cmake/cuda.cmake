# SPDX-License-Identifier: BSD-3-Clause
#
# Where cuda.h is. Nothing of CUDA is linked: libcuda is opened at run time, so the headers are all
# that a build needs, and a binary that was built with them also runs on a machine without a GPU.
#
# Sets gpumemx_cuda_include (empty when there is none) and gpumemx_cuda_version ("13.0").

set(gpumemx_cuda_include "")
set(gpumemx_cuda_version "")

if(GPUMEMX_CUDA)
  file(GLOB installed LIST_DIRECTORIES true /usr/local/cuda-*)
  # NVIDIA's headers as Python packages (nvidia-cuda-runtime, or what torch brings along).
  set(from_python "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import site, sysconfig; print(*{sysconfig.get_path('purelib'), *site.getsitepackages()}, sep=';')"
      OUTPUT_VARIABLE packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    foreach(folder IN LISTS packages)
      file(GLOB found "${folder}/nvidia/*/include")
      list(APPEND from_python ${found})
    endforeach()
  endif()
  find_path(GPUMEMX_CUDA_INCLUDE_DIR cuda.h
    HINTS ENV CUDA_HOME ENV CUDA_PATH ENV CUDAToolkit_ROOT /usr/local/cuda ${installed}
          ${from_python} /usr/include
    PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include
    NO_DEFAULT_PATH
    DOC "Folder of cuda.h")
  if(GPUMEMX_CUDA_INCLUDE_DIR)
    file(STRINGS "${GPUMEMX_CUDA_INCLUDE_DIR}/cuda.h" line REGEX "#define CUDA_VERSION +[0-9]+")
    if(line MATCHES "CUDA_VERSION +([0-9]+)")
      math(EXPR major "${CMAKE_MATCH_1} / 1000")
      math(EXPR minor "(${CMAKE_MATCH_1} % 1000) / 10")
      set(gpumemx_cuda_version "${major}.${minor}")
      set(gpumemx_cuda_include "${GPUMEMX_CUDA_INCLUDE_DIR}")
    endif()
  endif()
endif()
