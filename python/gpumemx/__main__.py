# SPDX-License-Identifier: BSD-3-Clause
"""The command ``gpumemx``, also as ``python -m gpumemx``."""

import sys


def main() -> int:
    """Run the command line and return its exit status."""
    if sys.argv[1:2] == ["run"]:
        # Not argparse's: everything after the program's name is the program's, and so is its end.
        # Nor does the program pay for importing what the other commands need.
        from gpumemx._run import run_command

        return run_command(sys.argv[2:])
    from gpumemx import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
