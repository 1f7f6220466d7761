# SPDX-License-Identifier: BSD-3-Clause
"""Finding what a process has taken from the driver itself, over a driver that is made up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpumemx import _outside
from gpumemx._outside import driver_ranges, find, merged, without

MIB = 1 << 20
PAGE = 2 * MIB

MAPS = """\
00400000-00401000 r-xp 00000000 08:01 123                                /usr/bin/python3.11
200000000-200200000 ---p 00000000 00:00 0
200200000-200400000 rw-s 00000000 00:05 630                              /dev/nvidiactl
7f0000000000-7f0000100000 ---p 00000000 00:00 0
7f1000000000-7f1100000000 ---p 00000000 00:00 0
7f2000000000-7f2010000000 ---p 00000000 00:00 0                          [heap]
7f3000000000-7f3000400000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
"""


def test_where_the_driver_may_have_memory() -> None:
    assert driver_ranges(MAPS) == [
        (0x200000000, PAGE),
        (0x200200000, PAGE),
        (0x7F1000000000, 0x100000000),
    ]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ([], [(100, 100), (300, 100)]),
        ([(0, 50), (200, 100), (400, 9)], [(100, 100), (300, 100)]),
        ([(100, 100)], [(300, 100)]),
        ([(150, 200)], [(100, 50), (350, 50)]),
        ([(120, 10), (140, 10)], [(100, 20), (130, 10), (150, 50), (300, 100)]),
        ([(0, 1000)], []),
    ],
)
def test_leaving_out_what_the_allocator_has(
    skip: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert without([(100, 100), (300, 100)], skip) == left


@pytest.mark.parametrize(
    ("ranges", "joined"),
    [
        ([], []),
        ([(5, 5), (0, 3)], [(0, 3), (5, 5)]),
        ([(0, 10), (2, 3), (4, 8)], [(0, 12)]),
        ([(0, 10), (10, 5), (12, 0)], [(0, 10), (10, 5)]),
    ],
)
def test_ranges_that_overlap_become_one(
    ranges: list[tuple[int, int]], joined: list[tuple[int, int]]
) -> None:
    assert merged(ranges) == joined


class FakeDriver(_outside.Driver):
    """Allocations by address: size, device (None: memory of the host)."""

    def __init__(
        self, allocations: dict[int, tuple[int, int | None]], contexts: tuple[int, ...] = (0,)
    ) -> None:
        self.allocations = allocations
        self.contexts = contexts
        self.current: int | None = None
        self.questions = 0

    def device_count(self) -> int | None:
        return 4

    def in_context(self, device: int, work: Callable[[], None]) -> bool:
        if device not in self.contexts:
            return False
        self.current = device
        work()
        self.current = None
        return True

    def allocation_at(self, address: int) -> tuple[int, int] | None:
        assert self.current is not None, "asked outside of a context"
        self.questions += 1
        for begin, (size, _) in self.allocations.items():
            if begin <= address < begin + size:
                return begin, size
        return None

    def next_page(self, page: int, end: int) -> int:
        pages = range(page, end, PAGE)
        return next((p for p in pages if self.allocation_at(p) is not None), end)

    def device_of(self, address: int) -> int | None:
        return self.allocations[address][1]


BASE = 0x7F1000000000


def maps(tmp_path: Path, size: int = 1 << 30) -> Path:
    path = tmp_path / "maps"
    path.write_text(f"{BASE:x}-{BASE + size:x} ---p 00000000 00:00 0 \n")
    return path


def test_large_and_small_ones_are_found(tmp_path: Path) -> None:
    driver = FakeDriver(
        {
            BASE: (512 * MIB, 0),
            BASE + 600 * MIB: (1000, 0),
            BASE + 600 * MIB + 1024: (70_000, 0),
            BASE + 600 * MIB + MIB: (300_000, 0),  # behind a gap, in the same page
            BASE + 700 * MIB: (3 * MIB, 1),
            BASE + 800 * MIB: (64 * MIB, None),  # pinned memory of the host
        }
    )
    found = find(driver, [], maps(tmp_path))
    assert found.unknown == ""
    assert found.bytes_on(0) == 512 * MIB + 1000 + 70_000 + 300_000
    assert found.bytes_on(1) == 3 * MIB
    assert found.bytes_on(2) == 0
    assert len(found.ranges[0]) == 4
    assert driver.questions < 600


def test_several_contexts_count_an_allocation_once(tmp_path: Path) -> None:
    driver = FakeDriver({BASE: (8 * MIB, 0), BASE + 64 * MIB: (4 * MIB, 2)}, contexts=(0, 2))
    found = find(driver, [], maps(tmp_path))
    assert (found.bytes_on(0), found.bytes_on(2)) == (8 * MIB, 4 * MIB)


def test_without_a_context_nothing_is_asked(tmp_path: Path) -> None:
    driver = FakeDriver({BASE: (8 * MIB, 0)}, contexts=())
    assert find(driver, [], maps(tmp_path)) == _outside.Found()
    assert driver.questions == 0


def test_the_allocators_addresses_are_not_looked_at(tmp_path: Path) -> None:
    driver = FakeDriver({BASE: (8 * MIB, 0), BASE + (1 << 40): (4 * MIB, 0)})
    found = find(driver, [(BASE, 1 << 40)], maps(tmp_path, (1 << 40) + 64 * MIB))
    assert found.bytes_on(0) == 4 * MIB
    assert driver.questions < 64


def test_an_allocation_that_is_skipped_in_part_does_not_count(tmp_path: Path) -> None:
    # Another process's: of one only the begin is known, of others a tensor in their middle.
    driver = FakeDriver(
        {
            BASE: (300 * MIB, 0),
            BASE + 400 * MIB: (20 * MIB, 0),
            BASE + 420 * MIB: (20 * MIB, 0),
            BASE + 440 * MIB: (20 * MIB, 0),
            BASE + 600 * MIB: (6 * MIB, 0),
        }
    )
    tensors = [(BASE + 411 * MIB, 15 * MIB), (BASE + 412 * MIB, MIB)]
    found = find(driver, [(BASE, 1), *tensors], maps(tmp_path))
    assert found.ranges[0] == [(BASE + 440 * MIB, 20 * MIB), (BASE + 600 * MIB, 6 * MIB)]


class Ranges:
    """libcuda with one allocation."""

    def __init__(self, begin: int, size: int) -> None:
        self.range = begin, size
        self.asked: list[int] = []

    def cuMemGetAddressRange_v2(self, begin: Any, size: Any, at: Any) -> int:  # noqa: N802
        self.asked.append(at.value)
        if not self.range[0] <= at.value < sum(self.range):
            return 1
        begin._obj.value, size._obj.value = self.range
        return 0


def test_the_next_page_with_memory_is_found() -> None:
    cuda = Ranges(BASE + 40 * MIB + 512, 3 * MIB)
    driver = _outside.Driver(cuda)
    assert driver.next_page(BASE, BASE + 100 * MIB) == BASE + 42 * MIB
    assert cuda.asked == list(range(BASE, BASE + 43 * MIB, PAGE))
    assert driver.next_page(BASE + 44 * MIB, BASE + 100 * MIB) == BASE + 100 * MIB
    assert driver.next_page(BASE, BASE + 40 * MIB) == BASE + 40 * MIB
    assert driver.allocation_at(BASE + 42 * MIB) == (BASE + 40 * MIB + 512, 3 * MIB)


def test_a_walk_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_outside, "_MOST_SECONDS", 0.02)
    driver = FakeDriver({BASE: (8 * MIB, 0)})
    found = find(driver, [], maps(tmp_path, 1 << 46))
    assert "more addresses than can be looked at in 0.02 s" in found.unknown


def test_without_proc_it_says_so(tmp_path: Path) -> None:
    found = find(FakeDriver({}), [], tmp_path / "none")
    assert "/proc/self/maps cannot be read" in found.unknown


def test_where_nobody_has_started_cuda_there_is_no_driver() -> None:
    assert _outside.Driver.if_started() is None


class Calls:
    """libcuda, as far as the order of calls goes."""

    def __init__(self, active: bool, failing: str = "") -> None:
        self.active = active
        self.failing = failing
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            if name == "cuDevicePrimaryCtxGetState":
                arguments[2]._obj.value = int(self.active)  # type: ignore[attr-defined]
            return 1 if name == self.failing else 0

        return call


def test_it_works_in_a_context_that_is_there_and_makes_none() -> None:
    cuda = Calls(active=False)
    assert not _outside.Driver(cuda).in_context(0, lambda: pytest.fail("there is no context"))
    assert "cuDevicePrimaryCtxRetain" not in cuda.calls

    cuda = Calls(active=True)
    assert _outside.Driver(cuda).in_context(0, lambda: cuda.calls.append("work"))
    assert cuda.calls[-7:] == [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "work",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxPopCurrent_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ]


def test_what_was_retained_is_released_whatever_fails() -> None:
    cuda = Calls(active=True, failing="cuCtxPushCurrent_v2")
    assert not _outside.Driver(cuda).in_context(0, lambda: pytest.fail("it is not current"))
    assert cuda.calls[-1] == "cuDevicePrimaryCtxRelease_v2"
    cuda = Calls(active=True)
    with pytest.raises(ZeroDivisionError):
        _outside.Driver(cuda).in_context(0, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert cuda.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
