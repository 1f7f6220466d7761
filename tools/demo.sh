#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The main job, from nothing: sets the machine up, installs gpumemx and replays the recorded training
# runs in examples/traces. Arguments go to `gpumemx replay` (tools/demo.sh --fit).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

set_up
install_package
say "gpumemx replay examples/traces/*.npz $*"
exec gpumemx replay examples/traces/*.npz "$@"
