# SPDX-License-Identifier: BSD-3-Clause
"""Steps a second and peak memory of the examples, torch's own allocator and gpumemx in turn.

Each run is a process of its own; the two alternate, so that a drift of the machine meets both. The
processes are forked from this one, which has imported torch and not started CUDA: that halves the
time. Prints the median of each and the ratio of the medians, and what gpumemx spent in the driver.

python examples.py [--runs N] [--steps N] [EXAMPLE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import re
import runpy
import statistics
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch  # noqa: F401  for the processes that are forked from this one
from harness import driver_figures

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
DRIVER = ("seconds", "seconds_inline", "seconds_growth")
STEPS = {"train_resnet50": 120, "finetune_encoder": 120, "decoder_kv_cache": 80}


def run_here(command: list[str], result: Connection) -> None:
    """Run a program in this process as `python COMMAND` would, and send what it prints."""
    sys.argv = command
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(command[0], run_name="__main__")
    driver = driver_figures() if "--gpumemx" in command else {}
    result.send((out.getvalue(), driver))


def run(name: str, steps: int, *, gpumemx: bool) -> dict[str, float]:
    command = [str(EXAMPLES / f"{name}.py"), "--steps", str(steps)]
    command += ["--gpumemx"] if gpumemx else []
    fork = multiprocessing.get_context("fork")
    result, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=run_here, args=(command, theirs))
    process.start()
    theirs.close()
    try:
        out, driver = result.recv()
    except EOFError:
        sys.exit(f"{' '.join(command)} failed, see above")
    finally:
        process.join()
    figures = {
        "live": r"peak live ([\d.]+) MiB",
        "reserved": r"peak reserved ([\d.]+) MiB",
        "rate": r"([\d.]+) steps/s",
    }
    found = {key: re.search(pattern, out) for key, pattern in figures.items()}
    numbers = {key: float(match.group(1)) for key, match in found.items() if match}
    return numbers | {key: driver[key] for key in DRIVER if key in driver}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="instead of each example's own number")
    parser.add_argument("names", nargs="*", default=list(STEPS))
    args = parser.parse_args()
    for name in args.names:
        steps = args.steps or STEPS[name]
        runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(args.runs):
            for gpumemx in (False, True):
                runs[gpumemx].append(run(name, steps, gpumemx=gpumemx))
        rate = {g: statistics.median(r["rate"] for r in runs[g]) for g in runs}
        native, ours = runs[False][0], runs[True][0]
        print(
            f"{name}: torch {rate[False]:.2f} steps/s, gpumemx {rate[True]:.2f} = "
            f"{rate[True] / rate[False]:.3f} x (median of {args.runs}); peak live "
            f"{native['live']:.0f} / {ours['live']:.0f} MiB, reserved {native['reserved']:.0f} / "
            f"{ours['reserved']:.0f} MiB = {native['reserved'] / native['live']:.3f} / "
            f"{ours['reserved'] / ours['live']:.3f} x live; all rates "
            f"{[r['rate'] for r in runs[False]]} / {[r['rate'] for r in runs[True]]}; "
            f"driver time of gpumemx {ours['seconds_inline'] * 1e3:.0f} ms in threads that allocate, "
            f"{ours['seconds_growth'] * 1e3:.0f} of it growth, {ours['seconds'] * 1e3:.0f} in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
