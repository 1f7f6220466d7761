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
