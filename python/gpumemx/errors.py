# SPDX-License-Identifier: BSD-3-Clause
"""Every exception that gpumemx raises on its own account."""


class GpumemxError(Exception):
    """Base of all of them."""


class TraceError(GpumemxError):
    """A trace or snapshot cannot be used: it is missing, broken, of another kind or inconsistent.

    ``str()`` is one line that begins with the file's name.

    Attributes
    ----------
    path : str
        The file, as it was named by the caller.
    reason : str
        What is wrong with it, one line without the name.
    """

    def __init__(self, path: str, reason: str) -> None:
        # One line, whatever a file name or a library's message brings along.
        self.path = path
        self.reason = " ".join(reason.split())
        super().__init__(f"{path}: {self.reason}")

    def __reduce__(self) -> tuple[type["TraceError"], tuple[str, str]]:
        return type(self), (self.path, self.reason)


class InstallError(GpumemxError, RuntimeError):
    """gpumemx cannot become torch's allocator in this process; the text says why and what to do."""


class SettingError(GpumemxError, ValueError):
    """A setting or a GPUMEMX_ variable is wrong; the text begins with where it was set."""


class RecoveryError(GpumemxError, RuntimeError):
    """Going on after an out-of-memory error is not possible here; the text says why."""


class MissingPackageError(GpumemxError, ImportError):
    """What was asked for needs an optional package that is not installed; the text names it."""
