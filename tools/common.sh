# SPDX-License-Identifier: BSD-3-Clause
#
# What the scripts of this folder share; sourced, not run. Leaves the caller in the checkout's root.
# Bash, with set -euo pipefail from the caller.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
jobs=$(nproc)

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
die() {
  printf 'gpumemx: %s\n' "$*" >&2
  exit 1
}

# The Python environment that everything is installed in: an active one, else the checkout's own.
venv=${VIRTUAL_ENV:-$root/.venv}

# Sets the machine up for the named parts (see tools/setup.sh) and puts the environment on the PATH.
set_up() {
  "$root/tools/setup.sh" "$@"
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
  unset PYTHONPATH PYTHONHOME
}

# One line that changes whenever a file below the given paths does. Files that git ignores don't
# count; without git, all files do, except what Python and the build leave there.
hash_of() {
  {
    git ls-files -co --exclude-standard -z -- "$@" 2>/dev/null ||
      find "$@" -type f -not -name '*.pyc' -not -name '*.so' -print0
  } | sort -zu | while IFS= read -r -d '' file; do
    if [ -f "$file" ]; then printf '%s\0' "$file"; fi
  done | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

# install_package [-D<option>...]: installs this checkout into the environment, unless the installed
# one is the same. The options go to CMake and don't make it another one. (Says `|| return`
# where it must stop: bash switches `set -e` off inside a function whose status is looked at.)
install_package() {
  local stamp="$venv/.gpumemx/package"
  local wanted
  # The adapter is for the torch that is there.
  wanted="$root ${CMAKE_ARGS:-} $(python cmake/find_torch.py) $(hash_of csrc python cmake \
    CMakeLists.txt setup.py pyproject.toml VERSION README.md LICENSE)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && python -c 'import gpumemx._core' 2>/dev/null; then
    echo "gpumemx: already installed from these sources"
    return
  fi
  rm -rf "$stamp" build/lib.*  # a module that was deleted must not be installed again
  # The build tools are in the environment already: without isolation pip need not fetch them again,
  # and the compiled objects of the last build are reused.
  CMAKE_ARGS="$* ${CMAKE_ARGS:-}" python -m pip install --quiet --disable-pip-version-check \
    --no-build-isolation "$root" || return 1
  printf '%s\n' "$wanted" >"$stamp"
}
