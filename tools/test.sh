#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds everything and runs all tests, from nothing:  tools/test.sh [--ci]
#
#   plain   the C++ tests in a debug build that validates itself, the package and its Python tests; with
#           the adapter for the torch of the environment, if there is one
#   --ci    also: torch and a browser are installed and the tests that need them may not be skipped;
#           lint, address + undefined-behaviour sanitizers, thread sanitizer, and the random programs
#           in their long form against the release build
#
# Ends with "N passed, N failed" over all runners; a step that is no test (a build, lint) counts as
# one when it fails. GPUMEMX_SEEDS and GPUMEMX_OPS size the random programs (CONTRIBUTING.md).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ci=
case "${1:-}" in
  "") ;;
  --ci) ci=1 ;;
  *) die "usage: tools/test.sh [--ci]" ;;
esac

if [ -n "$ci" ]; then
  set_up test lint browser torch
  # No test of the adapter or in a browser may be skipped.
  export GPUMEMX_REQUIRE_TORCH=1 GPUMEMX_REQUIRE_BROWSER=1
else
  set_up test
fi

results="$root/build/results"
rm -rf "$results"
mkdir -p "$results"
failed_steps=()

# Runs a step and goes on when it fails, so that one run shows all that is broken.
step() {
  local name=$1 began=$SECONDS
  shift
  say "$name"
  if "$@"; then
    echo "-- $name: ok, $((SECONDS - began)) s"
  else
    echo "-- $name: FAILED, $((SECONDS - began)) s"
    failed_steps+=("$name")
    return 0
  fi
}

build() {  # build <preset>
  cmake --preset "$1" -DPython_EXECUTABLE="$venv/bin/python" | sed -n '/^-- gpumemx/,/benchmarks:/p'
  [ "${PIPESTATUS[0]}" -eq 0 ] || return 1
  cmake --build --preset "$1" -j "$jobs" >"$results/build-$1.log" 2>&1 || {
    cat "$results/build-$1.log"
    return 1
  }
  tail -n 1 "$results/build-$1.log"
}

# The thread sanitizer of g++ 12 cannot start where the kernel spreads addresses widely.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi

cpp_tests() {  # cpp_tests <preset> <name of the result> <ctest argument>...
  local preset=$1 name=$2
  shift 2
  "${fixed_addresses[@]}" ctest --test-dir "build/$preset" -j "$jobs" --output-on-failure \
    --no-tests=error --output-junit "$results/$name.xml" "$@"
}
quiet() {
  "$@" >"$results/last.log" 2>&1 || {
    cat "$results/last.log"
    return 1
  }
  tail -n 6 "$results/last.log"
}

# The random programs print how often each path was entered: let it be seen, without ctest's chatter.
unit_tests() { quiet cpp_tests "$1" "cpp-$1" -LE property; }
property_tests() {
  cpp_tests "$1" "property-$1" -L property --verbose |
    grep -E '^[0-9]+: .|Test +#|tests passed' |
    grep -vE '^[0-9]+: (Test |Working |Running main|\[-{10}\])'
  return "${PIPESTATUS[0]}"
}

python_tests() {
  local rc=0
  python -m pytest -q --junitxml "$results/python.xml" || rc=$?
  [ "$rc" -ne 5 ] || echo "no Python test was found"
  return "$rc"
}

if [ -n "$ci" ]; then step "lint" tools/lint.sh; fi

step "build (debug, paranoid)" build dev
step "C++ tests" unit_tests dev
step "random programs" property_tests dev

step "install the package" install_package -DGPUMEMX_WERROR=ON
step "Python tests" python_tests

if [ -n "$ci" ]; then
  export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
  step "build (address and undefined-behaviour sanitizers)" build asan
  step "C++ tests under them" unit_tests asan
  GPUMEMX_SEEDS=${GPUMEMX_ASAN_SEEDS:-10} step "random programs under them" property_tests asan

  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
  step "build (thread sanitizer)" build tsan
  step "threaded tests under it" quiet cpp_tests tsan cpp-tsan -L threads

  step "build (release)" build release
  GPUMEMX_SEEDS=${GPUMEMX_SEEDS:-100} GPUMEMX_OPS=${GPUMEMX_OPS:-10000} \
    step "random programs, long form" property_tests release
fi

say "built with"
python - 2>/dev/null <<'PY' || echo "  the package is not installed"
from gpumemx import _core

for name, value in _core.build_info().items():
    print(f"  {name}: {value}")
PY
for name in "${failed_steps[@]}"; do echo "FAILED: $name"; done
echo
python tools/test_summary.py --failed-steps "${#failed_steps[@]}" "$results"/*.xml
