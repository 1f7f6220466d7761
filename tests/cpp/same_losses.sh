#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# same_losses.sh TRAIN [ARGUMENT...]: the example trains with gpumemx and with torch's own allocator, and
# every loss must be the same, bit for bit.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$@" --losses "$folder/gpumemx"
"$@" --losses "$folder/torch" --no-gpumemx
cmp "$folder/gpumemx" "$folder/torch"
echo "all $(wc -l <"$folder/torch") losses are equal, bit for bit"
