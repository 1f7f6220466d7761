# SPDX-License-Identifier: BSD-3-Clause
"""``python -m gpumemx``: the same as the command ``gpumemx``."""

import sys

from gpumemx.cli import main

if __name__ == "__main__":
    sys.exit(main())
