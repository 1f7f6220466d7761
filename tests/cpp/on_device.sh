#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# on_device.sh COMMAND...: runs a test that needs a device. Exit status 77, which ctest reports as
# skipped, where there is none; with GPUMEMX_REQUIRE_GPU=1 it is run all the same, and fails.
if [ "${GPUMEMX_REQUIRE_GPU:-}" != 1 ] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
  echo "skipped: there is no NVIDIA device on this machine"
  exit 77
fi
exec "$@"
