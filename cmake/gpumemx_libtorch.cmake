# SPDX-License-Identifier: BSD-3-Clause
#
# gpumemx_add_libtorch(<root>): the target gpumemx::libtorch, torch's headers and libraries as they are
# in <root>. For programs that need no more than that: find_package(Torch) also wants nvcc, and may be
# used in its place. Part of the installed package too.

function(gpumemx_add_libtorch root)
  if(TARGET gpumemx::libtorch)
    return()
  endif()
  add_library(gpumemx::libtorch INTERFACE IMPORTED GLOBAL)
  set(libraries "")
  foreach(name torch torch_cpu c10 torch_cuda c10_cuda)
    if(EXISTS "${root}/lib/lib${name}.so")
      list(APPEND libraries "${root}/lib/lib${name}.so")
    endif()
  endforeach()
  # Newer releases ask for C++20, which then says so when it is compiled.
  set_target_properties(gpumemx::libtorch PROPERTIES
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${root}/include;${root}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "${libraries}"
    # The CUDA libraries that torch's own need are found when the program starts, not when it is linked.
    INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")
endfunction()
