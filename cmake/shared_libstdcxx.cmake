# SPDX-License-Identifier: BSD-3-Clause
#
# gpumemx_shared_libstdcxx(<variable>): the path of libstdc++.so.6 where the compiler would silently take
# libstdc++.a, since it came without the link libstdc++.so (trimmed toolchains do); else empty.
#
# torch's libraries use the shared one. A second copy in a process shares some of its symbols with the
# first and not others: a stream crashes at the first number that it formats, or the process at exit.
# Named before the compiler's own -lstdc++, the shared one leaves nothing to take from the archive. Part
# of the installed package too: what is linked to gpumemx is in the same process.

function(gpumemx_shared_libstdcxx variable)
  set(${variable} "" PARENT_SCOPE)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$" OR "$ENV{CXXFLAGS} ${CMAKE_CXX_FLAGS}" MATCHES "libc\\+\\+")
    return()
  endif()
  # Without a path in front: not found.
  foreach(name libstdc++.so libstdc++.so.6)
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=${name}
      OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(IS_ABSOLUTE "${path}" AND EXISTS "${path}")
      if(name STREQUAL "libstdc++.so.6")
        set(${variable} "${path}" PARENT_SCOPE)
      endif()
      return()
    endif()
  endforeach()
endfunction()
