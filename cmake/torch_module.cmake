# SPDX-License-Identifier: BSD-3-Clause
#
# The Python module that holds the adapter, gpumemx/_torch_<major>_<minor>: one for each minor release
# of torch, since torch's allocator class changes its layout between them.
#
# Linked against c10, c10_cuda and torch_cuda without an rpath: torch is in the process when the
# module is loaded.

set(torch_module "_torch_${gpumemx_torch_major}_${gpumemx_torch_minor}")
file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/bindings/torch/*.cpp")
pybind11_add_module(${torch_module} MODULE NO_EXTRAS ${sources})
gpumemx_warnings(${torch_module})
target_compile_definitions(${torch_module} PRIVATE GPUMEMX_TORCH_MODULE=${torch_module})
target_link_libraries(${torch_module} PRIVATE gpumemx_adapter)
gpumemx_link_torch(${torch_module} c10 c10_cuda torch_cuda)
set_target_properties(${torch_module} PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  SKIP_BUILD_RPATH ON
  NO_SONAME ON
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/python/gpumemx")
add_dependencies(gpumemx_python ${torch_module})
