# SPDX-License-Identifier: BSD-3-Clause
"""How much memory would a recorded run have needed, and would it have fitted into less?

python examples/replay_trace.py [FILE]
"""

import sys
from pathlib import Path

import gpumemx


def main() -> None:
    default = Path(__file__).parent / "traces" / "resnet152.npz"
    trace = gpumemx.load_trace(sys.argv[1] if len(sys.argv) > 1 else default)

    # Without a limit: what the run needed, beside what no allocator can beat (the live bytes).
    result = gpumemx.replay(trace)
    print(result)

    # On a device of 95 % of that it fails, and this says where.
    smaller = gpumemx.replay(trace, capacity=int(0.95 * result.live_peak_bytes))
    print(f"with 95 % of the live peak: out of memory at event {smaller.failed_at:,}")

    # The smallest device that it runs on.
    fits_in = gpumemx.replay(trace, fit=True).fits_in_bytes
    assert fits_in is not None
    print(f"fits in {fits_in / 2**30:.3f} GiB, {fits_in / result.live_peak_bytes:.4f} x live")


if __name__ == "__main__":
    main()
