# SPDX-License-Identifier: BSD-3-Clause
"""Device memory that NCCL holds for the communicators of torch.distributed, as NCCL counts it.

It counts what it has allocated for a communicator, in the driver's pages. Not in it: our memory
that is registered with it, `ncclMemAlloc()`, which a pool of torch's has, and what peers share.
Communicators that torch does not show (of single pairs of ranks, of other libraries) are not asked:
what they hold stays in `outside`.

Makes no communicator, and waits for no collective that is queued. Communicators are asked through
torch, which does that under the lock that it destroys them under: to ask one by its address,
without that lock, could read memory that is freed. So while another thread destroys one this waits,
with Python's lock held, as it does for a non-blocking one to which a thread is giving work; those
that have failed or are not complete yet are not asked.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpumemx import _outside

_FIRST = (2, 29, 7)  # with ncclCommMemStats()
_NEEDED = ("_comm_ptr", "_is_initialized", "get_error")
_MOST = 1 << 63  # more is a count that went below zero
# Communicators that are split off with these have their parent's memory, and both count all of it.
_SHARING = ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "NCCL_COMM_SHRINK_SHARE_RESOURCES")


@dataclass(frozen=True)
class Held:
    """On one device."""

    bytes: int = 0
    unknown: str = ""
    """Why it is not known, or empty."""


class _Unknown(Exception):  # noqa: N818  # the reason is what it is for
    pass


def held(index: int, driver: _outside.Driver) -> Held:
    """Return what NCCL holds on a device; 0 where torch.distributed has no communicator there."""
    backends = list(_backends())
    found: dict[int, int] = {}  # by communicator: several groups may have the same
    try:
        for backend in backends:
            address = _communicator(backend, index, driver)
            if address:
                found[address] = _bytes_of(backend)
    except _Unknown as reason:
        return Held(unknown=str(reason))
    if len(found) > 1 and any(map(_shares, backends)):
        return Held(unknown="communicators share memory (split_share), and NCCL counts it for each")
    return Held(sum(found.values()))


def _backends() -> Iterator[Any]:
    """Yield the backends that the process groups have for CUDA devices, if NCCL's."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    if world is None:
        return
    cuda = sys.modules["torch"].device("cuda")
    # Other threads add to it: list() of a dict is one step for them.
    for group in list(world.pg_map):
        try:
            backend = group._get_backend(cuda)
        except RuntimeError:  # of the host
            continue
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if "NCCL" in type(backend).__name__:
            yield backend


def _communicator(backend: Any, index: int, driver: _outside.Driver) -> int:
    """Return the address of a backend's communicator on a device, or 0."""
    if not all(hasattr(backend, name) for name in _NEEDED):
        _check_version()
        # As with the backend "nccl2", which asks without a lock.
        raise _Unknown(f"communicators of {type(backend).__name__} are not asked")
    if backend.get_error().name != "SUCCESS":
        raise _Unknown(f"a communicator has failed ({backend.get_error().name})")
    if not backend._is_initialized():
        # Either there is none, or it does not block and is not complete: asking that one waits.
        if backend.options.config.blocking == 0:
            raise _Unknown("a communicator is not complete yet")
        return 0
    cuda = sys.modules["torch"].cuda
    addresses = {}
    for device in range(driver.device_count() or 0):
        if driver.has_context(device):  # making one the current device would start one
            with cuda.device(device):
                addresses[device] = _ask(backend, "_comm_ptr")
    if not addresses.get(index):
        return 0
    bound = getattr(backend, "bound_device_id", None)
    if sum(map(bool, addresses.values())) > 1 or (bound is not None and bound.index != index):
        raise _Unknown("a process group has communicators on several devices, torch tells of one")
    return int(addresses[index])


def _check_version() -> None:
    # Where the library is older than what torch was built with, its call would end the process.
    version = sys.modules["torch"].cuda.nccl.version()[:3]
    if version < _FIRST:
        numbers, first = (".".join(map(str, v)) for v in (version, _FIRST))
        raise _Unknown(f"NCCL {numbers} does not tell what it holds, {first} does")


def _bytes_of(backend: Any) -> int:
    _check_version()
    if not hasattr(backend, "memory_stats"):
        raise _Unknown("this torch does not ask NCCL, 2.12 does")
    stats = _ask(backend, "memory_stats")
    total = stats["total"]
    if total == 0:
        raise _Unknown("NCCL does not count what it takes from cudaMalloc (NCCL_CUMEM_ENABLE=0)")
    # Suspended memory is with the driver again, but still in the total.
    size = int(stats["persist"] if stats["suspended"] else total)
    if size >= _MOST:
        raise _Unknown("NCCL has counted below zero")
    return size


def _ask(backend: Any, name: str) -> Any:
    try:
        return getattr(backend, name)()
    except RuntimeError as error:  # aborted or destroyed, or NCCL refuses
        reason = (str(error).splitlines() or [""])[0].strip().rstrip(".")
        raise _Unknown(f"NCCL: {reason[:120] or type(error).__name__}") from None


def _shares(backend: Any) -> bool:
    if any(os.environ.get(name, "0") != "0" for name in _SHARING):
        return True
    return bool(backend.options.config.split_share == 1)
