# SPDX-License-Identifier: BSD-3-Clause
#
# The adapter layer and the Python module that holds it, gpumemx/_torch_<major>_<minor>: one for each
# minor release of torch, since torch's allocator class changes its layout between them.
#
# Linked against c10, c10_cuda and torch_cuda without an rpath: torch is in the process when the
# module is loaded. The few cuda* symbols of c10's inline functions come with them, so that no
# libcudart of ours is ever loaded.

set(torch_includes
  "${gpumemx_torch_root}/include" "${gpumemx_torch_root}/include/torch/csrc/api/include"
  "${gpumemx_cuda_include}")

gpumemx_layer(adapter USES runtime monitor core driver base)
target_include_directories(gpumemx_adapter SYSTEM PUBLIC ${torch_includes})

set(torch_module "_torch_${gpumemx_torch_major}_${gpumemx_torch_minor}")
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/bindings/torch/*.cpp")
pybind11_add_module(${torch_module} MODULE NO_EXTRAS ${sources})
gpumemx_warnings(${torch_module})
target_compile_definitions(${torch_module} PRIVATE GPUMEMX_TORCH_MODULE=${torch_module})
target_link_libraries(${torch_module} PRIVATE gpumemx_adapter)
foreach(lib c10 c10_cuda torch_cuda)
  # Missing where only headers are there: tools/check_torch_versions.sh compiles and does not link.
  if(EXISTS "${gpumemx_torch_root}/lib/lib${lib}.so")
    target_link_libraries(${torch_module} PRIVATE "${gpumemx_torch_root}/lib/lib${lib}.so")
  endif()
endforeach()
target_link_options(${torch_module} PRIVATE -Wl,--allow-shlib-undefined)
set_target_properties(${torch_module} PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  SKIP_BUILD_RPATH ON
  NO_SONAME ON
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/python/gpumemx")
add_dependencies(gpumemx_python ${torch_module})
