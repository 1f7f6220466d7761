# SPDX-License-Identifier: BSD-3-Clause
"""What physical memory stands behind a tensor: for RDMA, NCCL and others that register memory."""

from dataclasses import asdict, dataclass
from typing import Any, Protocol, SupportsIndex, cast

from gpumemx import _adapter


class HasDataPtr(Protocol):
    """What is used of ``torch.Tensor``."""

    def data_ptr(self) -> int: ...


@dataclass(frozen=True)
class MemoryBehind:
    """The memory behind one block of gpumemx's. Addresses, and bytes."""

    device: int
    address: int
    """Where the block begins. A tensor that is a view may begin behind it."""
    size: int
    """Of the block: what was asked for, rounded up."""
    base: int
    """Where the first piece of physical memory begins, at `address` or before it."""
    extent: int
    """From `base` on so much is mapped without a gap; all of the block lies in it."""
    handles: tuple[tuple[int, int], ...]
    """Address and size of each piece of physical memory, side by side."""
    plain: bool
    """Whether it is one ordinary device allocation, as cudaMalloc makes them."""
    handle_types: tuple[str, ...]
    """How it can be exported: ``cuda_ipc`` for plain memory, ``posix_fd`` a handle for other."""

    @property
    def registrable(self) -> bool:
        """Whether libraries that want one device allocation (`cudaIpcGetMemHandle`, ``ibv_reg_mr``
        by peer memory, NCCL's user buffers) can register it. Otherwise: allocate it in a
        ``torch.cuda.MemPool(no_split=True)``, run with ``GPUMEMX_CONF=mode:plain``, or export its
        handles."""
        return self.plain

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def memory_behind(tensor: HasDataPtr | SupportsIndex) -> MemoryBehind:
    """Say what physical memory a tensor, or a device address, stands on.

    It does not change while the tensor's block is in use, with one exception: when a block is first
    shared with another process, its handles may be replaced by others of one size, in place.

    Parameters
    ----------
    tensor
        A CUDA tensor (its first element counts), or an address.

    Raises
    ------
    RuntimeError
        gpumemx is not torch's allocator.
    ValueError
        It is in no block of gpumemx's that is in use: an empty tensor, a CPU tensor, memory from
        before the installation or of another library.

    Notes
    -----
    Asks neither the driver nor the device. Any thread; may wait some microseconds for one that
    allocates.

    Examples
    --------
    >>> import gpumemx
    >>> gpumemx.memory_behind(0)
    Traceback (most recent call last):
        ...
    RuntimeError: gpumemx is not torch's allocator ...
    """
    data_ptr = getattr(tensor, "data_ptr", None)
    address = int(data_ptr()) if data_ptr is not None else cast(SupportsIndex, tensor).__index__()
    adapter = _adapter.installed()
    if adapter is None:
        raise RuntimeError(
            "gpumemx is not torch's allocator in this process: call gpumemx.install_allocator() "
            "before the tensor is made"
        )
    found = adapter.memory_behind(address)
    if found is None:
        raise ValueError(f"0x{address:x} is in no block of gpumemx's that is in use")
    device, begin, size, handles, plain, exportable = found
    last, last_size = handles[-1]
    return MemoryBehind(
        device=device,
        address=begin,
        size=size,
        base=handles[0][0],
        extent=last + last_size - handles[0][0],
        handles=tuple(handles),
        plain=plain,
        handle_types=("cuda_ipc",) if plain else ("posix_fd",) if exportable else (),
    )
