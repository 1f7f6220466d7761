# SPDX-License-Identifier: BSD-3-Clause
"""Steps a second and peak memory of the examples, torch's own allocator and gpumemx in turn.

Each run is a process of its own; the two alternate, so that a drift of the machine meets both.
Prints the median of each and the ratio of the medians.

python examples.py [--runs N] [--steps N] [EXAMPLE ...]
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
STEPS = {"train_resnet50": 120, "finetune_encoder": 120, "decoder_kv_cache": 80}


def run(name: str, steps: int, *, gpumemx: bool) -> dict[str, float]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", str(steps)]
    command += ["--gpumemx"] if gpumemx else []
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures = {
        "live": r"peak live ([\d.]+) MiB",
        "reserved": r"peak reserved ([\d.]+) MiB",
        "rate": r"([\d.]+) steps/s",
    }
    found = {key: re.search(pattern, out) for key, pattern in figures.items()}
    return {key: float(match.group(1)) for key, match in found.items() if match}


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
        torch, ours = runs[False][0], runs[True][0]
        print(
            f"{name}: torch {rate[False]:.2f} steps/s, gpumemx {rate[True]:.2f} = "
            f"{rate[True] / rate[False]:.3f} x (median of {args.runs}); peak live "
            f"{torch['live']:.0f} / {ours['live']:.0f} MiB, reserved {torch['reserved']:.0f} / "
            f"{ours['reserved']:.0f} MiB = {torch['reserved'] / torch['live']:.3f} / "
            f"{ours['reserved'] / ours['live']:.3f} x live; all rates "
            f"{[r['rate'] for r in runs[False]]} / {[r['rate'] for r in runs[True]]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
