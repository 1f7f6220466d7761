#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Fail when a file in csrc/ includes from a layer above its own.

The table is the rule; csrc/README.md says why. Run by CI and by the pre-commit hook.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAY_INCLUDE = {
    "base": {"base"},
    "driver": {"base", "driver"},
    "core": {"base", "driver", "core"},
    "replay": {"base", "driver", "core", "replay"},
    "monitor": {"base", "driver", "core", "monitor"},
    "runtime": {"base", "driver", "core", "monitor", "runtime"},
    "adapter": {"base", "driver", "core", "monitor", "runtime", "adapter"},
    "api": {"base", "driver", "core", "monitor", "runtime", "adapter", "api"},
    "bindings": {"base", "driver", "core", "replay", "monitor", "runtime", "adapter", "bindings"},
    "include": set(),  # what is installed: the C++ library and <gpumemx/...>, nothing of ours
}
# Outside headers that only one place may see: what keeps the core buildable without CUDA, torch and
# Python. The binding of the adapter sees torch's headers too.
FENCED = {
    ("driver/cuda",): r"(cuda|nvml|nvrtc)\w*\.h",
    # api/ may catch torch's exceptions: its users need not.
    ("adapter", "bindings/torch", "api"): r"(c10|ATen|torch)/",
    ("include", "api"): r"gpumemx/",
    ("bindings",): r"pybind11/|Python\.h",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def complaints(root: Path) -> Iterator[str]:
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".hpp", ".cpp", ".cu", ".cuh"}):
        inside = path.relative_to(root)
        layer = inside.parts[0]
        if layer not in MAY_INCLUDE:
            yield f"{path}: {layer}/ is no layer (tools/check_layers.py has the table)"
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not (match := INCLUDE.match(line)):
                continue
            bracket, target = match.groups()
            if bracket == '"' and target.split("/")[0] not in MAY_INCLUDE[layer]:
                yield f"{path}:{number}: {layer}/ may not include {target}"
            for owners, pattern in FENCED.items():
                if not any(map(inside.is_relative_to, owners)) and re.match(pattern, target):
                    yield f"{path}:{number}: {bracket}{target} belongs in {owners[0]}/ only"


if __name__ == "__main__":
    found = list(complaints(Path(sys.argv[1] if len(sys.argv) > 1 else "csrc")))
    print("\n".join(found) or "layers: ok")
    sys.exit(bool(found))
