# SPDX-License-Identifier: BSD-3-Clause
"""Print `version;cuda;folder` of this Python's torch without importing it, or nothing.

pip builds in an environment of its own that hides the user's packages, but the interpreter is the
user's, so the folders that it installs into are looked at too: the adapter is for the torch there.
"""

import importlib.util
import pathlib
import re
import site
import sysconfig


def candidates() -> list[pathlib.Path]:
    found = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        found.append(pathlib.Path(spec.origin).parent)
    folders = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    folders += site.getsitepackages()
    return found + [pathlib.Path(folder) / "torch" for folder in folders]


def main() -> None:
    for folder in candidates():
        version = folder / "version.py"
        if not version.is_file():
            continue
        text = version.read_text()

        def value(name: str, text: str = text) -> str:
            found = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
            return found.group(1) if found else "none"

        print(f"{value('__version__')};{value('cuda')};{folder}")
        return


main()
