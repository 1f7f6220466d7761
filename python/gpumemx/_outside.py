# SPDX-License-Identifier: BSD-3-Clause
"""Device memory of this process that its code took from the driver itself, without torch's
allocator.

No interface lists it. But all of it has addresses, the kernel lists which addresses the driver
holds (/proc/self/maps), and the driver says of each address which allocation it is in. Starts no
CUDA and makes no context; changes nothing; some 20 ms on a large card. Allocations that begin or
end meanwhile may be missed.
"""

import bisect
import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PAGE = 2 << 20  # the driver's own: what has one of its own begins there
_UNIT = 512  # small allocations share a page, and begin at multiples
_GAP = 64 << 10  # between them
_MOST_SECONDS = 1.0
_AT_ONCE = 2048 * _PAGE  # between two looks at the clock
_MAPS = Path("/proc/self/maps")

# cuda.h
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_MEMORY_TYPE, _IS_MANAGED, _DEVICE_ORDINAL = 2, 8, 9  # CUpointer_attribute
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

Range = tuple[int, int]  # begin and size


@dataclass
class Found:
    """Allocations by device. Managed memory, which may be anywhere, does not count."""

    ranges: dict[int, list[Range]] = field(default_factory=dict)
    unknown: str = ""
    """Why there may be more, or empty."""

    def bytes_on(self, device: int) -> int:
        return sum(size for _, size in self.ranges.get(device, ()))


class Driver:
    """What is asked of libcuda."""

    def __init__(self, library: Any) -> None:
        self._cuda = library

    @classmethod
    def if_started(cls) -> "Driver | None":
        """Return the driver if this process has loaded and started it."""
        try:
            driver = cls(ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD))
        except OSError:
            return None
        return driver if driver.device_count() is not None else None

    def device_count(self) -> int | None:
        """Return how many devices there are; None before anybody has started CUDA."""
        count = ctypes.c_int()
        return count.value if self._cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else None

    def has_context(self, device: int) -> bool:
        """Whether the process has the device's primary context, the one that torch uses."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        handle = ctypes.c_int()
        if self._cuda.cuDeviceGet(ctypes.byref(handle), device) != 0:
            return False
        state = self._cuda.cuDevicePrimaryCtxGetState
        return state(handle, ctypes.byref(flags), ctypes.byref(active)) == 0 and bool(active.value)

    def in_context(self, device: int, work: Callable[[], None]) -> bool:
        """Do some work in the device's context and outside of captures; False if that can't be."""
        if not self.has_context(device):
            return False
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        cuda = self._cuda
        if (
            cuda.cuDeviceGet(ctypes.byref(handle), device) != 0
            or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle) != 0
        ):
            return False
        try:
            if cuda.cuCtxPushCurrent_v2(context) != 0:
                return False
            # Whatever another thread captures, these questions are none of its business.
            mode = ctypes.c_int(_RELAXED)
            relaxed = cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
            try:
                work()
            finally:
                if relaxed:
                    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
                cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
        finally:
            cuda.cuDevicePrimaryCtxRelease_v2(handle)
        return True

    def allocation_at(self, address: int) -> Range | None:
        """Return the allocation that an address lies in."""
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        at = ctypes.c_uint64(address)
        found = self._cuda.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), at)
        return (begin.value, size.value) if found == 0 and size.value > 0 else None

    def next_page(self, page: int, end: int) -> int:
        """Return the first page in [page, end) whose begin lies in an allocation, or `end`.

        Libraries reserve terabytes that are nearly empty, so this is but the calls.
        """
        begin, size, at = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
        to_begin, to_size = ctypes.byref(begin), ctypes.byref(size)
        ask = self._cuda.cuMemGetAddressRange_v2
        for candidate in range(page, end, _PAGE):
            at.value = candidate
            if ask(to_begin, to_size, at) == 0 and size.value > 0:
                return candidate
        return end

    def device_of(self, address: int) -> int | None:
        """Return the device whose memory is there; None for memory of the host, and managed one."""
        if self._attribute(_MEMORY_TYPE, address) != _DEVICE_MEMORY:
            return None
        if self._attribute(_IS_MANAGED, address):
            return None
        return self._attribute(_DEVICE_ORDINAL, address)

    def _attribute(self, which: int, address: int) -> int | None:
        value = ctypes.c_uint(0)
        at = ctypes.c_uint64(address)
        failed = self._cuda.cuPointerGetAttribute(ctypes.byref(value), which, at)
        return None if failed else value.value


def find(driver: Driver, skip: Iterable[Range], maps: Path = _MAPS) -> Found:
    """Find the allocations of all devices on which this process has a context.

    Parameters
    ----------
    skip
        Addresses at which torch's allocators have their memory: not looked at. An allocation that
        lies there in part, as one of another process that is open here, does not count at all: NVML
        counts it for who has made it.
    """
    found = Found()
    skip = merged(skip)
    begins = [begin for begin, _ in skip]
    try:
        places = without(driver_ranges(maps.read_text()), skip)
    except OSError as error:
        found.unknown = f"/proc/self/maps cannot be read: {error}"
        return found
    # Large reservations of addresses, mostly empty, come last: they are what may take too long.
    places.sort(key=lambda place: place[1])
    until = time.monotonic() + _MOST_SECONDS
    seen: set[int] = set()

    def skipped(allocation: Range) -> bool:
        # The last that begins before its end is the one that ends last, too.
        at = bisect.bisect_left(begins, sum(allocation)) - 1
        return at >= 0 and sum(skip[at]) > allocation[0]

    def look() -> None:
        for begin, size in places:
            for allocation in _allocations(driver, begin, begin + size, until):
                if allocation[0] in seen or skipped(allocation):
                    continue
                device = driver.device_of(allocation[0])
                if device is not None:
                    seen.add(allocation[0])
                    found.ranges.setdefault(device, []).append(allocation)

    try:
        for device in range(driver.device_count() or 0):
            driver.in_context(device, look)
    except TimeoutError:
        found.unknown = (
            f"this process holds more addresses than can be looked at in {_MOST_SECONDS:g} s"
        )
    return found


def _allocations(driver: Driver, at: int, end: int, until: float) -> Iterator[Range]:
    """Yield what lies in [at, end). Small ones behind a gap in the same page may be missed."""
    step = _PAGE
    while at < end:
        if time.monotonic() > until:
            raise TimeoutError
        allocation = driver.allocation_at(at)
        if allocation is None:
            at = (at // step + 1) * step
            if at % _PAGE == 0 and at < end:
                at = driver.next_page(at, min(end, at + _AT_ONCE))
        else:
            yield allocation
            at = max(at + _UNIT, -(-sum(allocation) // _UNIT) * _UNIT)
            step = _GAP
        if at % _PAGE == 0:
            step = _PAGE


def driver_ranges(maps: str) -> list[Range]:
    """Return the addresses in /proc/self/maps that the CUDA driver may have memory of devices at.

    It reserves them without any access, or maps its device files there.
    """
    found = []
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if len(words) < 5:
            continue
        first, last = (int(number, 16) for number in words[0].split("-"))
        name = words[5] if len(words) > 5 else ""
        reserved = words[1].startswith("---") and not name and last - first >= _PAGE
        if reserved or name.startswith("/dev/nvidia"):
            found.append((first, last - first))
    return found


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the same addresses in order, in ranges that do not overlap."""
    found: list[Range] = []
    for begin, size in sorted(ranges):
        if found and begin < sum(found[-1]):
            last = found[-1][0]
            found[-1] = last, max(sum(found[-1]), begin + size) - last
        elif size > 0:
            found.append((begin, size))
    return found


def without(ranges: Sequence[Range], skip: Iterable[Range]) -> list[Range]:
    """Return `ranges` less what lies in any of `skip`."""
    left = sorted((begin, begin + size) for begin, size in ranges)
    for begin, size in skip:
        end, parts = begin + size, []
        for first, last in left:
            if end <= first or last <= begin:
                parts.append((first, last))
                continue
            if first < begin:
                parts.append((first, begin))
            if end < last:
                parts.append((end, last))
        left = parts
    return [(first, last - first) for first, last in left]
