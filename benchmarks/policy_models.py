#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The models of torch's allocator against what a card measured, for each trace given.

    python benchmarks/policy_models.py examples/traces/*.npz

Measured: the trace through torch 2.11's own allocator on one H200, without kernels
(tools/gpu_benchmarks.sh traces); "fits" is the smallest limit that it passes in over what is live,
found by bisection to 0.4 %. Exit status 1 when a model is more than 1 % off.
"""

import argparse
from pathlib import Path

from gpumemx import TraceError, replay

# By the file's name and the policy: peak reserved in GiB, fits.
MEASURED = {
    "bert_finetune": {"native": (24.984, 1.047), "expandable": (14.395, 1.012)},
    "fsdp_streams": {"native": (8.779, 1.051), "expandable": (8.363, 1.035)},
    "gnn_sampling": {"native": (32.014, 1.022), "expandable": (25.557, 1.005)},
    "llm_pretrain": {"native": (47.744, 1.139), "expandable": (34.186, 1.009)},
    "lora_rlhf": {"native": (14.559, 1.163), "expandable": (9.203, 1.018)},
    "moe": {"native": (19.877, 1.086), "expandable": (17.564, 1.032)},
    "resnet152": {"native": (14.078, 1.033), "expandable": (11.654, 1.002)},
    "unet_buckets": {"native": (37.303, 1.196), "expandable": (22.145, 1.017)},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    args = parser.parse_args()
    off = 0
    print(f"{'trace':16} {'policy':10} {'reserved GiB':>24} {'fits in / live':>24}")
    print(f"{'':27} {'card':>8} {'model':>8} {'off':>6} {'card':>8} {'model':>8} {'off':>6}")
    for file in args.files:
        name = Path(file).stem
        if name not in MEASURED:
            parser.error(f"{file}: nothing was measured for a trace of this name")
        for policy, measured in MEASURED[name].items():
            try:
                result = replay(file, policy=policy, fit=True)
            except TraceError as error:
                raise SystemExit(str(error)) from None
            fits_in = result.fits_in_bytes or 0
            model = (result.reserved_peak_bytes / 2**30, fits_in / result.live_peak_bytes)
            cells = ""
            for card, ours in zip(measured, model, strict=True):
                cells += f" {card:8.3f} {ours:8.3f} {100 * (ours / card - 1):+5.1f}%"
                off += abs(ours / card - 1) > 0.01
            print(f"{name:16} {policy:10}{cells}", flush=True)
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
