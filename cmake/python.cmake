# SPDX-License-Identifier: BSD-3-Clause
#
# The Python extension gpumemx/_core. pybind11 is the one that the given Python has (a PyPI package);
# it is asked anew at every configure, because pip builds in a temporary environment each time.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no pybind11: install it there "
                      "(pip install pybind11), or configure with -DGPUMEMX_BUILD_PYTHON=OFF")
endif()
set(pybind11_DIR "${pybind11_DIR}" CACHE PATH "Of the Python package pybind11" FORCE)
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 2.13 CONFIG REQUIRED)

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/bindings/*.cpp")
pybind11_add_module(_core MODULE NO_EXTRAS ${sources})
gpumemx_warnings(_core)
target_link_libraries(_core PRIVATE gpumemx_replay gpumemx_runtime gpumemx_core gpumemx_driver gpumemx_base)
set_target_properties(_core PROPERTIES
  CXX_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/python/gpumemx")

# All modules of the package; setup.py builds this and takes what is there.
add_custom_target(gpumemx_python DEPENDS _core)
