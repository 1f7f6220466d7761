# SPDX-License-Identifier: BSD-3-Clause
#
# The adapter layer, for the torch that torch.cmake found. Its users are the Python module
# (torch_module.cmake) and the C++ library (library.cmake).

set(torch_includes
  "${gpumemx_torch_root}/include" "${gpumemx_torch_root}/include/torch/csrc/api/include"
  "${gpumemx_cuda_include}")

gpumemx_layer(adapter USES runtime monitor core driver base)
target_include_directories(gpumemx_adapter SYSTEM PUBLIC ${torch_includes})
# What only newer torch declares carries no `override` (torch_allocator.hpp says why).
target_compile_options(gpumemx_adapter PUBLIC
  $<$<CXX_COMPILER_ID:Clang,AppleClang>:-Wno-inconsistent-missing-override>)

# How this torch keeps cuBLAS's workspaces (adapter/blas_workspaces.cpp): 1 memory alone, 2 with its size,
# 0 in another way, and then they are not told apart. Its header can't be included: it needs cuBLAS's own.
set(workspaces 0)
set(header "${gpumemx_torch_root}/include/ATen/cuda/CUDAContextLight.h")
if(EXISTS "${header}")
  file(READ "${header}" text)
  string(REGEX REPLACE "[ \n]+" " " text "${text}")
  set(before "struct WorkspaceMapWithMutex { std::map<std::tuple<void*, void*>, ")
  set(after " map@ std::shared_mutex mutex@ }@")
  string(REPLACE ";" "@" text "${text}")
  string(FIND "${text}" "${before}at::DataPtr>${after}" one)
  string(FIND "${text}" "${before}std::pair<at::DataPtr, size_t>>${after}" two)
  if(NOT one EQUAL -1)
    set(workspaces 1)
  elseif(NOT two EQUAL -1)
    set(workspaces 2)
  endif()
endif()
target_compile_definitions(gpumemx_adapter PRIVATE GPUMEMX_TORCH_WORKSPACES=${workspaces})

# gpumemx_link_torch(<target> <library of torch>...). Missing where only headers are there:
# tools/check_torch_versions.sh compiles and does not link. The few cuda* symbols of c10's inline
# functions come with torch's libraries, so that no libcudart of ours is ever loaded.
function(gpumemx_link_torch target)
  foreach(lib IN LISTS ARGN)
    if(EXISTS "${gpumemx_torch_root}/lib/lib${lib}.so")
      target_link_libraries(${target} PRIVATE "${gpumemx_torch_root}/lib/lib${lib}.so")
    endif()
  endforeach()
  target_link_options(${target} PRIVATE -Wl,--allow-shlib-undefined)
endfunction()
