# SPDX-License-Identifier: BSD-3-Clause
"""What the access of one device and of two costs a handle: cuMemSetAccess and what goes with it.

For handles of several sizes, microseconds, medians over many handles that are created, mapped,
given access, unmapped and released again:

one             access for the device itself
two             for itself and another device, in one call
second, later   for the other device, when the first has it: a handle's part of enabling the access
unmap one, two  unmapping a handle that one or two devices have access to

Besides the memory is idle, nothing runs, and the other device's context exists.

python set_access.py [--handles N] [--device D] [--other D]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu
from harness import MIB, table

SIZES_MIB = (2, 8, 32, 64)
COLUMNS = ("one", "two", "second, later", "unmap one", "unmap two")


def call(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    error, *values = function(*arguments)
    if error != cu.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"{function.__name__}: {error.name}")
    return values[0] if values else None


def access(device: int) -> Any:
    description = cu.CUmemAccessDesc()
    description.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    description.location.id = device
    description.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return description


class Handle:
    """Memory of one size at an address of its own."""

    def __init__(self, device: int, size: int) -> None:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        properties.requestedHandleTypes = (
            cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        self.size = size
        self.address = call(cu.cuMemAddressReserve, size, 2 * MIB, 0, 0)
        self.handle = call(cu.cuMemCreate, size, properties, 0)

    def map(self) -> None:
        call(cu.cuMemMap, self.address, self.size, 0, self.handle, 0)

    def free(self) -> None:
        call(cu.cuMemRelease, self.handle)
        call(cu.cuMemAddressFree, self.address, self.size)


def microseconds(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> float:
    begin = time.perf_counter()
    call(function, *arguments)
    return (time.perf_counter() - begin) * 1e6


def measure(device: int, other: int, size: int, handles: int) -> dict[str, float]:
    one, two = [access(device)], [access(device), access(other)]
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(handles):
        memory = Handle(device, size)
        at = (memory.address, size)
        memory.map()
        found["one"].append(microseconds(cu.cuMemSetAccess, *at, one, 1))
        found["unmap one"].append(microseconds(cu.cuMemUnmap, *at))
        memory.map()
        found["two"].append(microseconds(cu.cuMemSetAccess, *at, two, 2))
        found["unmap two"].append(microseconds(cu.cuMemUnmap, *at))
        memory.map()
        call(cu.cuMemSetAccess, *at, one, 1)
        later = microseconds(cu.cuMemSetAccess, *at, [access(other)], 1)
        found["second, later"].append(later)
        call(cu.cuMemUnmap, *at)
        memory.free()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--handles", type=int, default=300, help="of each size (300)")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--other", type=int, default=1)
    args = parser.parse_args()
    call(cu.cuInit, 0)
    count = call(cu.cuDeviceGetCount)
    if count <= max(args.device, args.other):
        raise SystemExit(f"there are {count} devices")
    if not call(cu.cuDeviceCanAccessPeer, args.other, args.device):
        raise SystemExit(f"device {args.other} can't access the memory of device {args.device}")
    for device in (args.other, args.device):
        call(cu.cuCtxSetCurrent, call(cu.cuDevicePrimaryCtxRetain, device))
    measure(args.device, args.other, 2 * MIB, 20)  # the first calls are slower
    rows = []
    for size in SIZES_MIB:
        medians = measure(args.device, args.other, size * MIB, args.handles)
        rows.append([f"{size} MiB", *(f"{medians[name]:.1f}" for name in COLUMNS)])
    print()
    table(["handle of", *COLUMNS], rows)


if __name__ == "__main__":
    main()
