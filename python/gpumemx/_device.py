# SPDX-License-Identifier: BSD-3-Clause
"""Which device a caller means, and whether there is one. Neither starts CUDA nor imports torch."""

import operator
import re
import sys
from typing import Protocol, SupportsIndex, TypeAlias


class TorchDevice(Protocol):
    """What is used of ``torch.device``."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


Device: TypeAlias = int | str | TorchDevice | None


def device_index(device: Device) -> int:
    """Return the index of a CUDA device.

    Parameters
    ----------
    device
        An index, ``"cuda"``, ``"cuda:1"``, a ``torch.device``; None or no index for the current
        device, which is 0 before CUDA has started.

    Raises
    ------
    ValueError
        It is negative or names something else than a CUDA device.
    TypeError
        It is of another type.
    """
    if device is None:
        return _current()
    if isinstance(device, str):
        found = re.fullmatch(r"cuda(?::(\d+))?", device.strip())
        if found is None:
            raise ValueError(f"'{device}' is no CUDA device; write 'cuda:1' or 1")
        return _current() if found[1] is None else int(found[1])
    if isinstance(device, bool):
        raise TypeError(_WRONG_TYPE + "bool")
    if isinstance(device, SupportsIndex):
        number = operator.index(device)
        if number < 0:
            raise ValueError(f"there is no CUDA device {number}")
        return number
    if not isinstance(getattr(device, "type", None), str):
        raise TypeError(_WRONG_TYPE + type(device).__name__)
    if device.type != "cuda":
        raise ValueError(f"'{device}' is no CUDA device")
    return _current() if device.index is None else device.index


_WRONG_TYPE = "a device is an index, a name such as 'cuda:1' or a torch.device, not "


def _current() -> int:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return 0
    return int(cuda.current_device())


def no_device() -> bool:
    """Whether the imported torch sees no CUDA device at all. Starts no CUDA: it asks NVML."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return cuda is not None and cuda.device_count() == 0
    except Exception:  # a driver that is too old, or a warning made an error
        return True
