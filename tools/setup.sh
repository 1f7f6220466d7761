#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Sets a Debian or Ubuntu machine up that has python3 and git:
#
#   tools/setup.sh [test] [lint] [coverage] [browser] [torch]
#
# Always: a C++20 compiler and Python's headers (system packages), and a Python environment with the
# build tools (PyPI): the active one, else .venv in the checkout. With `test`: GoogleTest, Catch2 and
# pytest too; with `lint` and `coverage`: their tools (lint: doxygen too); with `browser`: a headless
# Chromium and playwright, which opens pages in it (150 MB); with `torch`: PyTorch and the CUDA
# libraries that it brings (some GB). What is there is left alone, so a second run takes a moment.
# System packages are installed with sudo when not root.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for part in "$@"; do
  case $part in test | lint | coverage | browser | torch) ;; *) die "tools/setup.sh: no part named '$part'" ;; esac
done
wants() { case " $all " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
all=$*

command -v python3 >/dev/null || die "python3 is missing: apt-get install python3"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  die "python3 is $(python3 -V), gpumemx needs 3.10 or newer"

# --- system packages ---

has_header() { echo "#include <$1>" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }
# By the names that tests/python/test_page.py looks for.
has_chromium() {
  command -v chromium-headless-shell || command -v chromium || command -v chromium-browser ||
    command -v google-chrome
} >/dev/null
has_python_headers() {
  python3 -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
}

missing=()
has_header compare || missing+=(g++)
# An active environment brings what venv would make.
[ -n "${VIRTUAL_ENV:-}" ] || python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
has_python_headers || missing+=(python3-dev)
if wants test; then
  has_header gtest/gtest.h || missing+=(libgtest-dev)
  has_header catch2/catch_all.hpp || has_header catch2/catch.hpp || missing+=(catch2)
fi
if wants lint && ! command -v doxygen >/dev/null; then missing+=(doxygen); fi
if wants browser && ! has_chromium; then missing+=(chromium-headless-shell); fi

if [ ${#missing[@]} -gt 0 ]; then
  # Without a compiler no header could be looked for: ask for all of them, apt knows better.
  say "installing system packages: ${missing[*]}"
  command -v apt-get >/dev/null ||
    die "this machine has no apt-get; install what is called here ${missing[*]} and run this again"
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      die "not root and no sudo; let an administrator run: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get update -qq ||
    echo "gpumemx: apt-get update failed; going on with the lists that are there" >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get install ${missing[*]} failed (see above)"
  has_header compare ||
    die "the compiler $(command -v g++ || true) knows no C++20: g++ 11 or newer is needed"
  has_python_headers ||
    die "Python.h of $(command -v python3) is still missing; install its development files"
fi

# --- the Python environment ---

if [ -z "${VIRTUAL_ENV:-}" ] && [ ! -x "$venv/bin/python" ]; then
  say "making $venv"
  python3 -m venv "$venv"
fi
python="$venv/bin/python"
[ -x "$python" ] || die "$venv is no virtual environment (VIRTUAL_ENV names it)"
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --default-pip >/dev/null ||
  die "the environment $venv has no pip and none could be put in"

mkdir -p "$venv/.gpumemx"
for part in build "$@"; do
  list="tools/requirements/$part.txt"
  stamp="$venv/.gpumemx/$part.txt"
  if ! cmp -s "$list" "$stamp"; then
    say "installing what tools/requirements/$part.txt names into $venv"
    "$python" -m pip install --quiet --disable-pip-version-check -r "$list"
    cp "$list" "$stamp"
  fi
done
