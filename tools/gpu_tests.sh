#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The tests that need a device, on a machine that has one and need not reach any network: everything
# is built, then the contract suite of the drivers and all tests with the label gpu run; a skip counts
# as a failure. There must be cmake, ninja, g++, CUDA's headers, GoogleTest, and a python3 with numpy,
# pybind11, rich and nvidia-ml-py. Nothing is installed and nothing is written into the checkout.
#
#   tools/gpu_tests.sh       all of it
#   tools/gpu_tests.sh cpp   only the C++ library: scenarios of its interface, how programs end, what an
#                            unloaded module leaves, and examples/cpp built from an install prefix and
#                            trained with gpumemx and without it. Needs torch and Catch2, no pybind11.
#
#   BUILD_DIR=<folder>   where to build; default: a new temporary folder
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

only=
case "${1:-}" in
  "") ;;
  cpp) only=cpp ;;
  *) die "usage: tools/gpu_tests.sh [cpp]" ;;
esac

for tool in cmake ninja g++ python3; do
  command -v "$tool" >/dev/null || die "$tool is missing on this machine"
done
build=${BUILD_DIR:-$(mktemp -d -t gpumemx-gpu-XXXXXX)}
mkdir -p "$build"
python=$(command -v python3)

with_python=ON with_benchmarks=ON target=all
if [ -n "$only" ]; then with_python=OFF with_benchmarks=OFF target=gpumemx_library_tests; fi
[ -n "$only" ] || "$python" -c 'import pybind11' 2>/dev/null || {
  echo "gpumemx: this python3 has no pybind11: the Python tests are left out"
  with_python=OFF
}

say "device"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
  echo "nvidia-smi gives no answer"

say "build in $build"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g" \
  -DPython_EXECUTABLE="$python" -DGPUMEMX_BUILD_TESTS=ON -DGPUMEMX_BUILD_BENCHMARKS=$with_benchmarks \
  -DGPUMEMX_BUILD_PYTHON=$with_python | sed -n '/^-- gpumemx/,/benchmarks:/p'
grep -q 'GPUMEMX_CUDA_INCLUDE_DIR:PATH=/' "$build/CMakeCache.txt" ||
  die "cuda.h was not found, so the CUDA driver was left out: set CUDA_HOME"
if [ -n "$only" ] && ! grep -q 'gpumemx_library_tests' "$build/build.ninja"; then
  die "the C++ library was left out: see above"
fi
cmake --build "$build" -j "$jobs" --target "$target" | tail -n 3

export GPUMEMX_REQUIRE_GPU=1
results="$build/results"
rm -rf "$results"
mkdir -p "$results"
failed=0
run() { "$@" || failed=$((failed + 1)); }

if [ -n "$only" ]; then
  say "the C++ library"
  run ctest --test-dir "$build" -R '^cpp/' -L '^gpu$' -j 4 --no-tests=error --output-on-failure \
    --output-junit "$results/cpp.xml"
  say "summary"
  exec "$python" tools/test_summary.py --no-skips --failed-steps "$failed" "$results"/*.xml
fi

say "contract suite: the device"
run ctest --test-dir "$build" -R '^contract/' -L '^gpu$' --no-tests=error --output-on-failure \
  --output-junit "$results/contract-device.xml"
say "contract suite: the simulated device"
run ctest --test-dir "$build" -R '^contract/' -LE '^gpu$' --no-tests=error --output-on-failure \
  --output-junit "$results/contract-simulated.xml"
say "all other tests that need a device"
run ctest --test-dir "$build" -L '^gpu$' -E '^contract/' --output-on-failure \
  --output-junit "$results/gpu.xml"

# Most of these tests start programs that import torch: side by side they take a quarter of the time.
# (pytest-benchmark, where it is installed, warns of pytest-xdist.)
side_by_side=()
if "$python" -c 'import xdist' 2>/dev/null; then
  side_by_side=(-n 6)
  "$python" -c 'import pytest_benchmark' 2>/dev/null && side_by_side+=(-p no:benchmark)
fi

# pytest over the built package; the first argument names the file of results. 5: there were no tests.
py_tests() {
  local name=$1 rc=0
  shift
  PYTHONPATH="$build/python" PYTHONDONTWRITEBYTECODE=1 "$python" -m pytest -q -p no:cacheprovider \
    --junitxml "$results/$name.xml" "$@" || rc=$?
  [ "$rc" -eq 0 ] || [ "$rc" -eq 5 ] || failed=$((failed + 1))
}

if [ "$with_python" = ON ] && [ -d tests/python ] && "$python" -c 'import pytest' 2>/dev/null; then
  cp -r python/gpumemx "$build/python/"
  folders=(tests/python)
  if "$python" -c 'import torch' 2>/dev/null; then
    folders+=(tests/gpu)  # all of those are about torch
    say "a serving engine, which takes all of the device: nothing beside it"
    py_tests serving tests/gpu/test_serving.py
  fi
  say "Python tests that need a device"
  py_tests python -m gpu "${side_by_side[@]}" --ignore=tests/gpu/test_graphs_and_pools.py \
    --ignore=tests/gpu/test_serving.py --ignore=tests/gpu/two_cards "${folders[@]}"
  devices=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0)
  if [ "$devices" -ge 2 ]; then
    say "two devices"
    GPUMEMX_REQUIRE_GPUS=2 py_tests two-cards "${side_by_side[@]}" tests/gpu/two_cards
  fi
fi

# In a process of their own: they install the allocator before CUDA starts.
if [ "$with_python" = ON ] && PYTHONPATH="$build/python" "$python" -c \
  'import pytest; from gpumemx import _adapter; _adapter.load()' 2>/dev/null; then
  say "graphs and memory pools of torch"
  py_tests graphs-and-pools "${side_by_side[@]}" tests/gpu/test_graphs_and_pools.py
fi

say "summary"
"$python" tools/test_summary.py --no-skips --failed-steps "$failed" "$results"/*.xml
