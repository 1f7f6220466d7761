#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# g++ as it is in a toolchain without the link libstdc++.so: it takes libstdc++.a and says nothing.
for argument in "$@"; do
  case $argument in
    -print-file-name=libstdc++.so) echo libstdc++.so && exit ;;
    -c | -E | -S) exec g++ "$@" ;;
  esac
done
exec g++ -static-libstdc++ "$@"
