#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# one_libstdcxx.sh PROGRAM: runs a program, which must take the standard library from libstdc++.so.6, as
# torch's libraries do, and contain no copy.
set -eu
readelf --dynamic --wide "$1" | grep -q 'NEEDED.*libstdc++\.so\.6' || {
  echo "$1 has a standard library of its own" && exit 1
}
exec "$1"
