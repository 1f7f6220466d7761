#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# tools/gpu_benchmarks.sh [--tiny] [SECTION]... [-- ARGUMENT...]
#
#   pairs traces checked   benchmarks/gpu/allocator_bench.py
#   examples loops largest habits host   the script of that name (host: host_bound.py)
#   cards   distributed.py, which needs two devices; not among all
#   access  set_access.py, likewise
#
# Builds what the benchmarks need and runs the sections named, or all, on a machine with a device that
# need not reach any network; the tables are printed last. The arguments after -- go to the scripts in
# place of this one's, which keep a section to a few minutes; `-- ` and nothing more means the scripts'
# own defaults. --tiny is a dry run without a device. There must be what tools/gpu_tests.sh needs, and
# torch.
#
#   BUILD_DIR=<folder>   where to build; default: a new temporary folder
#   LIMIT=<seconds>      for each section; default 540. What was printed before it is kept
#   TRACES="<file>..."   recorded runs for traces and checked; default: examples/traces
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

all=(pairs traces checked examples loops largest habits host)
of_two_devices=(cards access)
sections=()
tiny=()
given=0
while [ $# -gt 0 ]; do
  case $1 in
    --tiny) tiny=(--tiny) ;;
    --)
      given=1
      shift
      break
      ;;
    *)
      [[ " ${all[*]} ${of_two_devices[*]} " == *" $1 "* ]] ||
        die "there is no section '$1'; there are ${all[*]} ${of_two_devices[*]}"
      sections+=("$1")
      ;;
  esac
  shift
done
arguments=("$@")
[ ${#sections[@]} -gt 0 ] || sections=("${all[@]}")

python=$(command -v python3)
build=${BUILD_DIR:-$(mktemp -d -t gpumemx-bench-XXXXXX)}
results="$build/results"
mkdir -p "$results"

say "build in $build"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" \
  -DGPUMEMX_BUILD_TESTS=OFF -DGPUMEMX_BUILD_BENCHMARKS=ON -DGPUMEMX_BUILD_PYTHON=ON |
  tee "$results/configure.txt" | sed -n '/^-- gpumemx/,/benchmarks:/p'
grep -q 'torch adapter: in' "$results/configure.txt" || die "there is no torch to build for"
cmake --build "$build" -j "$jobs" --target gpumemx_gpu_benchmarks | tail -n 1
cp -r python/gpumemx "$build/python/"
export PYTHONPATH="$build/python:$build/benchmarks" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

if [ ${#tiny[@]} -eq 0 ]; then
  say "device"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null ||
    echo "nvidia-smi gives no answer"
fi
"$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
git rev-parse --short HEAD 2>/dev/null || true

# What a section runs, one word a line: the script, what belongs to the section, the short defaults.
command_of() {
  local traces=() short=()
  [ -z "${TRACES:-}" ] || read -ra traces <<<"--traces $TRACES"
  case $1 in
    pairs) set -- allocator_bench.py --sections pairs ;;
    traces) set -- allocator_bench.py --sections traces "${traces[@]}" ;;
    checked) set -- allocator_bench.py --sections checked "${traces[@]}" ;;
    examples) set -- examples.py ;;
    loops)
      set -- loops.py
      short=(--runs 1 --steps 24 --loops bert llm unet)
      ;;
    largest)
      set -- largest.py
      short=(--steps 8 --tolerance 0.02)
      ;;
    habits)
      set -- habits.py
      short=(--steps 16)
      ;;
    cards)
      set -- distributed.py
      short=(--runs 3 --steps 45)
      ;;
    access) set -- set_access.py ;;
    host)
      set -- host_bound.py
      short=(--runs 3)
      ;;
  esac
  [ ${#tiny[@]} -eq 0 ] || short=()
  [ "$given" -eq 0 ] || short=("${arguments[@]}")
  printf '%s\n' "$@" "${short[@]}" "${tiny[@]}"
}

failed=()
for section in "${sections[@]}"; do
  mapfile -t words < <(command_of "$section")
  say "$section: ${words[*]}"
  begin=$SECONDS
  timeout -k 10 "${LIMIT:-540}" "$python" "benchmarks/gpu/${words[0]}" "${words[@]:1}" |
    tee "$results/$section.txt" || failed+=("$section")
  echo "$section: $((SECONDS - begin)) s"
done

say "tables"
for section in "${sections[@]}"; do
  sed -n '/^$/,$p' "$results/$section.txt"
done
[ ${#failed[@]} -eq 0 ] || die "did not come to their end: ${failed[*]}"
