# SPDX-License-Identifier: BSD-3-Clause
"""The version, as the installed package says; it is written once, in the file VERSION."""

from importlib import metadata

try:
    __version__ = metadata.version("gpumemx")
except metadata.PackageNotFoundError:  # used from a checkout, with the extension beside it
    from gpumemx._core import __version__

__all__ = ["__version__"]
