#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# tools/lint.sh [layers|format|ruff|mypy|locks|reference|tidy|fix]...   without arguments: the first six
#
# Needs the tools of tools/requirements/lint.txt (tools/setup.sh lint). `fix` rewrites what the
# formatters would complain about. `tidy` needs clang-tidy 14 or newer and a configured build/dev; it
# is slow and not part of CI.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
PATH="$venv/bin:$PATH"

cpp_files() { find csrc tests benchmarks examples -name '*.[ch]pp' -print0; }

lint() {
  case $1 in
    layers) python3 tools/check_layers.py ;;
    format) cpp_files | xargs -0 clang-format --dry-run -Werror && echo "format: ok" ;;
    ruff) ruff check --quiet . && ruff format --check --quiet . && echo "ruff: ok" ;;
    mypy) mypy --strict && echo "mypy: ok" ;;
    locks)
      # clang's thread-safety analysis: which lock guards what, and that it is held. Needs clang++.
      command -v clang++ >/dev/null || {
        echo "locks: left out, there is no clang++"
        return 0
      }
      mkdir -p build/lint/base
      sed -E 's/@gpumemx_[a-z_]*(paranoid|adapter)@/false/; s/@[A-Za-z_]+@//g' cmake/version.hpp.in >build/lint/base/version.hpp
      find csrc/{base,driver/sim,core,monitor,runtime,replay} csrc/driver/*.cpp -name '*.cpp' -print0 |
        xargs -0 -P "$(nproc)" -n 8 clang++ -std=c++20 -fsyntax-only -Icsrc -Ibuild/lint -Wall -Wextra \
          -Wthread-safety -Werror && echo "locks: ok"
      ;;
    reference)
      # The C++ reference: everything public is documented, and what is referred to exists.
      command -v doxygen >/dev/null || {
        echo "reference: left out, there is no doxygen"
        return 0
      }
      mkdir -p build/reference
      doxygen docs/Doxyfile && echo "reference: ok"
      ;;
    tidy) find csrc -name '*.cpp' -not -path '*/bindings/*' -print0 | xargs -0 clang-tidy -p build/dev --quiet ;;
    fix) cpp_files | xargs -0 clang-format -i && ruff check --quiet --fix . && ruff format --quiet . ;;
    *) die "tools/lint.sh: no check named '$1'" ;;
  esac
}

status=0
[ $# -gt 0 ] || set -- layers format ruff mypy locks reference
for check in "$@"; do
  lint "$check" || {
    echo "$check: FAILED" >&2
    status=1
  }
done
exit "$status"
