#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Compiles the adapter against torch's headers, one minor release after the other, and prints a table:
#
#   tools/check_torch_versions.sh              every minor that PyPI has from 2.11 on, its last patch
#   tools/check_torch_versions.sh 2.11 2.15.1  only these (a minor means its last patch)
#
# Nothing is linked and no torch is installed. Wheels are downloaded (0.5 to 1 GB each), their headers
# are kept in build/torch-headers/<version>, the rest is thrown away; a second run downloads nothing.
# Exit status 1 when one failed; its compiler output is in build/torch-headers/<version>.log.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
cache="$root/build/torch-headers"
mkdir -p "$cache"
oldest=2.11

# A machine's own pip configuration may cap the versions; what is asked here is what PyPI has.
pypi() { PIP_CONFIG_FILE=/dev/null python -m pip --disable-pip-version-check "$@"; }

known=
# The last patch of the minor $1.
last_patch() {
  if [ -z "$known" ]; then
    known=$(pypi index versions torch 2>/dev/null | sed -n 's/^Available versions: //p' | tr -d ' ' |
      tr , '\n' | grep -v '[+]') || true  # a local version is not a release
    [ -n "$known" ] || die "PyPI's list of torch's versions could not be read"
  fi
  grep -E "^${1//./\\.}(\.|$)" <<<"$known" | sort -V | tail -n 1
}

headers_of() {  # headers_of <version>: fills $cache/<version>/include
  local version=$1 temporary
  [ -d "$cache/$version/include" ] && return
  temporary=$(mktemp -d "$cache/download-XXXXXX")
  # Three =: not 2.13.0+cpu, which a machine's own list of wheels may hold.
  if ! pypi download --quiet --no-deps --only-binary :all: -d "$temporary" "torch===$version"; then
    rm -rf "$temporary"
    return 1
  fi
  python - "$temporary" <<'PY' || { rm -rf "$temporary"; return 1; }
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("torch-*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("torch/include/"):
            archive.extract(name, folder)
PY
  rm -rf "${cache:?}/$version"
  mv "$temporary/torch" "$cache/$version"
  rm -rf "$temporary"
}

compiles() {  # compiles <version>
  local version=$1 build="$cache/$1/build" objects
  rm -rf "$build"  # a glob of an earlier configure may name files that are gone
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 \
    -DPython_EXECUTABLE="$venv/bin/python" -DGPUMEMX_TORCH_ROOT="$cache/$version" \
    -DGPUMEMX_BUILD_PYTHON=ON -DGPUMEMX_BUILD_TESTS=OFF || return 1
  objects=$(ninja -C "$build" -t targets all | sed -nE 's/^([^:]*csrc\/(adapter|bindings\/torch)\/[^:]*\.o):.*/\1/p')
  [ -n "$objects" ] || { echo "no adapter in this build (see above)"; return 1; }
  # shellcheck disable=SC2086  # one word an object
  ninja -C "$build" -k 0 -j "$jobs" $objects || return 1
  rm -rf "$build"
}

if [ $# -eq 0 ]; then
  last_patch 2 >/dev/null  # reads the list
  mapfile -t minors < <(cut -d. -f1,2 <<<"$known" | sort -uV)
  for minor in "${minors[@]}"; do
    [ "$(printf '%s\n' "$oldest" "$minor" | sort -V | head -n 1)" = "$oldest" ] && set -- "$@" "$minor"
  done
fi

failed=0
table=()
for wanted in "$@"; do
  case $wanted in
    *.*.*) version=$wanted ;;
    *) version=$(last_patch "$wanted") || version= ;;
  esac
  [ -n "$version" ] || { table+=("$wanted|no such release"); failed=1; continue; }
  say "torch $version"
  if ! headers_of "$version"; then
    table+=("$version|not downloaded")
    failed=1
  elif compiles "$version" >"$cache/$version.log" 2>&1; then
    table+=("$version|ok")
  else
    grep -E 'error|warning: ' "$cache/$version.log" | head -n 20 || tail -n 5 "$cache/$version.log"
    table+=("$version|FAILED")
    failed=1
  fi
done

say "adapter, compiled with $(c++ --version | head -n 1)"
printf '| torch | compiles |\n|---|---|\n'
for row in "${table[@]}"; do printf '| %s | %s |\n' "${row%%|*}" "${row#*|}"; done
exit "$failed"
