# SPDX-License-Identifier: BSD-3-Clause
#
# The C++ library for LibTorch programs: libgpumemx, its headers, and what CMake and pkg-config need
# to find them. In a build tree (add_subdirectory) the targets have the same names as after
# find_package: gpumemx::gpumemx, and gpumemx::libtorch for programs that use torch's own headers.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The public headers are C++17; what implements them is C++20 and does not show.
configure_file(csrc/include/gpumemx/version.hpp.in include/gpumemx/version.hpp @ONLY)
set(public_includes
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc/include>"
  "$<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>"
  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")

gpumemx_layer(api USES adapter runtime monitor core driver base)
target_include_directories(gpumemx_api PUBLIC ${public_includes})

# Everything of the layers stays inside; the linker takes the api layer as a whole, since nothing in
# the library itself calls it.
file(WRITE "${PROJECT_BINARY_DIR}/generated/library.cpp" "// All code is in the layers.\n")
add_library(gpumemx SHARED "${PROJECT_BINARY_DIR}/generated/library.cpp")
add_library(gpumemx::gpumemx ALIAS gpumemx)
target_compile_features(gpumemx INTERFACE cxx_std_17)
target_include_directories(gpumemx INTERFACE ${public_includes})
target_link_libraries(gpumemx PRIVATE
  -Wl,--whole-archive "$<BUILD_INTERFACE:gpumemx_api>" -Wl,--no-whole-archive)
gpumemx_link_torch(gpumemx c10 c10_cuda torch_cpu torch_cuda)
# Programs that reach CUDA only through torch_cpu's dispatcher would not load torch_cuda themselves.
target_link_options(gpumemx PRIVATE LINKER:--no-as-needed)
# What torch's libraries leave to theirs (CUDA's) is not the program's to link.
target_link_options(gpumemx INTERFACE LINKER:--allow-shlib-undefined)
target_link_libraries(gpumemx INTERFACE "$<BUILD_INTERFACE:${gpumemx_libstdcxx}>")
set_target_properties(gpumemx PROPERTIES
  VERSION "${PROJECT_VERSION}"
  # Before 1.0 a minor version may change the interface.
  SOVERSION "${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}"
  # It belongs to the torch that it was built with, and finds it where that is.
  INSTALL_RPATH "$ORIGIN;${gpumemx_torch_root}/lib")

include(gpumemx_libtorch)
gpumemx_add_libtorch("${gpumemx_torch_root}")

# --- install

set(package "${CMAKE_INSTALL_LIBDIR}/cmake/gpumemx")
install(TARGETS gpumemx EXPORT gpumemxTargets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT cpp)
install(DIRECTORY csrc/include/gpumemx "${PROJECT_BINARY_DIR}/include/gpumemx"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT cpp FILES_MATCHING PATTERN "*.hpp")
install(EXPORT gpumemxTargets NAMESPACE gpumemx:: DESTINATION "${package}" COMPONENT cpp)

configure_package_config_file(cmake/gpumemxConfig.cmake.in gpumemxConfig.cmake
  INSTALL_DESTINATION "${package}" NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(gpumemxConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/gpumemxConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/gpumemxConfigVersion.cmake"
  cmake/find_torch_root.cmake cmake/find_torch.py cmake/gpumemx_libtorch.cmake cmake/shared_libstdcxx.cmake
  DESTINATION "${package}" COMPONENT cpp)

file(RELATIVE_PATH gpumemx_pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file(cmake/gpumemx.pc.in gpumemx.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/gpumemx.pc"
  DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT cpp)
