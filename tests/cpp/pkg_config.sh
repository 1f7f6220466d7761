#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# The consumer program built with nothing but a compiler and pkg-config:
#
#   pkg_config.sh PKG_CONFIG COMPILER FOLDER_OF_THE_PC_FILE VERSION PROGRAM_TO_WRITE
set -eu
pkg_config=$1 compiler=$2 version=$4 program=$5
export PKG_CONFIG_PATH="$3"

found=$("$pkg_config" --modversion gpumemx)
[ "$found" = "$version" ] || {
  echo "pkg-config finds version $found, not $version" >&2
  exit 1
}
# shellcheck disable=SC2046  # several words
"$compiler" -std=c++17 -Wall -Wextra -Wpedantic -Werror tests/cpp/consumer/consumer.cpp -o "$program" \
  $("$pkg_config" --cflags --libs gpumemx)
"$program"
