# SPDX-License-Identifier: BSD-3-Clause
#
# GPUMEMX_SANITIZE and GPUMEMX_COVERAGE, for every target below: a program is instrumented as a whole
# or its reports mean nothing.

if(NOT GPUMEMX_SANITIZE STREQUAL "")
  if(NOT GPUMEMX_SANITIZE MATCHES "^(address|undefined|address,undefined|thread)$")
    message(FATAL_ERROR "GPUMEMX_SANITIZE is '${GPUMEMX_SANITIZE}'; it can be empty, address, "
                        "undefined, 'address,undefined' or thread")
  endif()
  add_compile_options(-fsanitize=${GPUMEMX_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${GPUMEMX_SANITIZE})
endif()

if(GPUMEMX_COVERAGE)
  add_compile_options(--coverage -fprofile-update=atomic)
  add_link_options(--coverage)
endif()
