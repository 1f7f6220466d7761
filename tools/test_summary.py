#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Add up JUnit files: a table of the runners, then `N passed, N failed[, N skipped]`.

Exit status 1 when anything failed or nothing ran. A failed step that is no test (a build, lint) is
counted by the caller and given with --failed-steps; it counts here only as far as no failed test
already says so.
"""

import argparse
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def count(path: Path) -> Counter[str]:
    """Passed, failed and skipped tests of one JUnit file."""
    counts: Counter[str] = Counter()
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--failed-steps", type=int, default=0)
    parser.add_argument("--no-skips", action="store_true", help="a skipped test is a failed one")
    args = parser.parse_args()

    total: Counter[str] = Counter()
    print(f"{'runner':<24}{'passed':>8}{'failed':>8}{'skipped':>9}")
    for path in sorted(p for p in args.files if p.exists()):
        counts = count(path)
        total += counts
        print(f"{path.stem:<24}{counts['passed']:>8}{counts['failed']:>8}{counts['skipped']:>9}")
    failed = max(total["failed"], args.failed_steps)
    if args.no_skips:
        failed += total["skipped"]
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    print(f"{total['passed']} passed, {failed} failed{skipped}")
    return int(failed > 0 or total["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main())
