# SPDX-License-Identifier: BSD-3-Clause
"""The examples with and without gpumemx: the same losses bit for bit, and no more memory.

Each example runs twice, with deterministic algorithms, all at the same time. Compared at every
step: the loss, to the bit; requested_bytes, to the byte; allocated_bytes, which must not be above
torch's own. Prints a line an example; exit status 1 when one differs.

python same_as_native.py [--steps N] [EXAMPLE ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
NAMES = ("train_resnet50", "finetune_encoder", "decoder_kv_cache")


def run(name: str, steps: int, *, gpumemx: bool) -> tuple[list[str], list[list[int]], list[str]]:
    """Return the losses, (requested, allocated, reserved) a step, and the last lines."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", str(steps)]
    command += ["--deterministic", "--print-losses", "--print-memory"]
    if gpumemx:
        command.append("--gpumemx")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    lines = [line.split() for line in done.stdout.splitlines()]
    losses = [line[2] for line in lines if line[0] == "loss"]
    memory = [[int(word) for word in line[2:5]] for line in lines if line[0] == "memory"]
    return losses, memory, done.stdout.splitlines()[-3:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("names", nargs="*", default=NAMES)
    args = parser.parse_args()
    failed = False
    with ThreadPoolExecutor() as threads:
        runs = {
            (name, gpumemx): threads.submit(run, name, args.steps, gpumemx=gpumemx)
            for name in args.names
            for gpumemx in (False, True)
        }
    for name in args.names:
        losses, memory, end = runs[name, False].result()
        our_losses, our_memory, our_end = runs[name, True].result()
        same = losses == our_losses and len(losses) == args.steps
        requested = [m[0] for m in memory] == [m[0] for m in our_memory] and len(memory) > 0
        above = max(ours[1] - theirs[1] for theirs, ours in zip(memory, our_memory, strict=True))
        failed = failed or not (same and requested and above <= 0)
        print(
            f"{name}: {len(losses)} losses {'equal' if same else 'DIFFER'}, "
            f"requested bytes {'equal' if requested else 'DIFFER'}, "
            f"allocated at most {above} B above; torch: {', '.join(end)}; "
            f"gpumemx: {', '.join(our_end)}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
