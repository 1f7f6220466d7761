#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# tools/lint.sh [layers|format|ruff|mypy|tidy|fix]...   without arguments: the first four
#
# Needs the tools of tools/requirements/lint.txt (tools/setup.sh lint). `fix` rewrites what the
# formatters would complain about. `tidy` needs clang-tidy 14 or newer and a configured build/dev; it
# is slow and not part of CI.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
PATH="$venv/bin:$PATH"

cpp_files() { find csrc tests benchmarks -name '*.[ch]pp' -print0; }

lint() {
  case $1 in
    layers) python3 tools/check_layers.py ;;
    format) cpp_files | xargs -0 clang-format --dry-run -Werror && echo "format: ok" ;;
    ruff) ruff check --quiet . && ruff format --check --quiet . && echo "ruff: ok" ;;
    mypy) mypy --strict && echo "mypy: ok" ;;
    tidy) find csrc -name '*.cpp' -not -path '*/bindings/*' -print0 | xargs -0 clang-tidy -p build/dev --quiet ;;
    fix) cpp_files | xargs -0 clang-format -i && ruff check --quiet --fix . && ruff format --quiet . ;;
    *) die "tools/lint.sh: no check named '$1'" ;;
  esac
}

status=0
[ $# -gt 0 ] || set -- layers format ruff mypy
for check in "$@"; do
  lint "$check" || {
    echo "$check: FAILED" >&2
    status=1
  }
done
exit "$status"
