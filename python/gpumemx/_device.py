# SPDX-License-Identifier: BSD-3-Clause
"""Which device a caller means, and whether there is one. Neither starts CUDA nor imports torch."""

import operator
import re
import sys
from typing import Any, Protocol, SupportsIndex, TypeAlias


class TorchDevice(Protocol):
    """What is used of ``torch.device``."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


SomeDevice: TypeAlias = int | str | TorchDevice
Device: TypeAlias = SomeDevice | None


def device_index(device: Device) -> int:
    """Return the index of a CUDA device.

    Parameters
    ----------
    device
        An index, ``"cuda"``, ``"cuda:1"``, a ``torch.device``, or a UUID as ``nvidia-smi -L`` lists
        it (``"GPU-..."``, ``"MIG-..."``), which may be cut short; None or no index for the current
        device, which is 0 before CUDA has started.

    Raises
    ------
    ValueError
        It is negative, names something else than a CUDA device, or is no UUID of one that this
        process sees.
    TypeError
        It is of another type.
    """
    if device is None:
        return _current()
    if isinstance(device, str):
        name = device.strip()
        if name.startswith(("GPU-", "MIG-")):
            return _index_of(name)
        found = re.fullmatch(r"cuda(?::(\d+))?", name)
        if found is None:
            raise ValueError(f"'{device}' is no CUDA device; write 'cuda:1', 1 or a UUID")
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


_WRONG_TYPE = "a device is an index, a name such as 'cuda:1', a UUID or a torch.device, not "


def _started_cuda() -> Any:
    """Return ``torch.cuda`` if it has started, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _current() -> int:
    cuda = _started_cuda()
    return 0 if cuda is None else int(cuda.current_device())


def _index_of(name: str) -> int:
    from gpumemx import _nvml

    cuda = _started_cuda()
    if cuda is not None:
        # CUDA names a MIG device and a whole one alike, without what is in front.
        kind = name[:4]
        uuids = [f"{kind}{cuda.get_device_properties(i).uuid}" for i in range(cuda.device_count())]
    else:
        try:
            uuids = _nvml.visible_here()
        except _nvml.Unavailable as reason:
            raise ValueError(f"which device '{name}' is cannot be told: {reason}") from None
    meant = _nvml.match(name, uuids)
    if len(meant) == 1:
        return uuids.index(meant[0])
    if meant:
        raise ValueError(f"'{name}' is the beginning of {len(meant)} devices' UUIDs")
    seen = ", ".join(uuids) or "none"
    raise ValueError(f"this process sees no device '{name}'; it sees {seen}")


def no_device() -> bool:
    """Whether the imported torch sees no CUDA device at all. Starts no CUDA: it asks NVML."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    try:
        return cuda is not None and cuda.device_count() == 0
    except Exception:  # a driver that is too old, or a warning made an error
        return True
