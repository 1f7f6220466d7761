# SPDX-License-Identifier: BSD-3-Clause
"""Which devices CUDA_VISIBLE_DEVICES shows, and what names one."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeCard, FakeNvml, NVMLError, put_in_place
from gpumemx import _nvml
from gpumemx._device import device_index
from gpumemx._nvml import Card, Unavailable, handle_of, visible

# The first two begin alike.
A, B, C, D = "GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444"
FOUR = [Card(A), Card(B), Card(C), Card(D)]
M, N, L = "MIG-1111", "MIG-1222", "MIG-GPU-cccc4444/1/0"
CUT = [Card(A), Card(C, migs=(M, N)), Card(D, migs=(L,))]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, [A, B, C, D]),
        ("", []),
        (" ", []),
        ("0", [A]),
        ("3,1", [D, B]),
        (" 2 , 0 ", [C, A]),
        ("+1", [B]),
        ("1gpu2,2ampere", [B, C]),
        # -1 ends the list, and so does what is no number or no device.
        ("-1", []),
        ("1,-1,2", [B]),
        ("0,7,1", [A]),
        ("0,,1", [A]),
        ("0,x,1", [A]),
        ("none", []),
        ("NoDevFiles", []),
        # Twice the same leaves none at all.
        ("1,1", []),
        ("0,2,0", []),
        # UUIDs, whole or cut short as long as they mean one.
        (f"{C},{A}", [C, A]),
        ("GPU-b", [C]),
        ("GPU-aaaa1,GPU-c", [A, D]),
        (f" {D} , {A} ", [D, A]),
        ("GPU-aaaa", []),
        ("GPU-c,GPU-aaaa,GPU-b", [D]),
        ("GPU-zzzz", []),
        (f"{C},GPU-b", []),
        (f"{C},1", [C]),
        (f"1,{C}", [B]),
        ("gpu-bbbb3333", []),
        ("MIG-1111", []),
    ],
)
def test_the_variable_is_read_as_the_driver_reads_it(text: str | None, shown: list[str]) -> None:
    assert visible(text, FOUR) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0", [A]),
        ("1", [M]),
        ("0,1", [M]),
        ("2,1", [L]),
        (C, [M]),
        (M, [M]),
        ("MIG-12", [N]),
        ("MIG-1", []),
        (L, [L]),
        ("MIG-GPU-cccc", [L]),
        (f"{N},{M}", [N]),
        (f"{A},{M}", [A]),
    ],
)
def test_of_mig_devices_one_is_shown(text: str, shown: list[str]) -> None:
    assert visible(text, CUT) == shown


def test_a_card_that_is_cut_into_nothing_is_not_shown() -> None:
    assert visible("0,1", [Card(A, migs=()), Card(B)]) == [B]


def test_the_fastest_first_is_not_guessed() -> None:
    mixed = [Card(A, "A"), Card(B, "B")]
    for text in (None, "0", "1,0"):
        with pytest.raises(Unavailable, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            visible(text, mixed)
    assert visible("1,0", mixed, by_bus=True) == [B, A]
    assert visible(f"{B},{A}", mixed) == [B, A]
    assert visible("", mixed) == []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Four cards, and CUDA not started."""
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setattr(_nvml, "_started_in", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    yield put_in_place(
        *(FakeCard(uuid, bus=f"00000000:{i + 1:02X}:00.0") for i, uuid in enumerate((A, B, C, D)))
    )
    _nvml._started_in = 0


def test_a_uuid_names_a_device(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,0")
    assert device_index(D) == 0
    assert device_index(" GPU-b ") == 1
    assert device_index(A) == 2
    with pytest.raises(ValueError, match=f"sees no device '{B}'; it sees {D}, {C}, {A}"):
        device_index(B)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match="the beginning of 2 devices' UUIDs"):
        device_index("GPU-a")
    machine.broken["nvmlDeviceGetCount"] = NVMLError("Driver Not Loaded")
    with pytest.raises(ValueError, match="cannot be told: NVML: Driver Not Loaded"):
        device_index(A)


def test_a_card_is_found_by_its_uuid_and_never_by_its_index(
    machine: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert handle_of(0).uuid == C
    assert handle_of(1).uuid == A
    with pytest.raises(Unavailable, match=r"shows 2 device\(s\)"):
        handle_of(2)


def started(*devices: Any) -> Any:
    """``torch`` after the start of CUDA, with these properties of devices."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: len(devices),
        get_device_properties=lambda index: devices[index],
        current_device=lambda: 1,
    )
    return SimpleNamespace(cuda=cuda)


def test_once_cuda_has_started_its_own_uuids_count(
    machine: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.cards[2].migs = [FakeCard("MIG-77777")]
    torch = started(
        SimpleNamespace(uuid="cccc4444"),
        SimpleNamespace(uuid="77777"),
        SimpleNamespace(uuid=None, pci_domain_id=0, pci_bus_id=2, pci_device_id=0),
    )
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # changed since: without effect
    assert handle_of(0).uuid == D
    assert handle_of(1).uuid == "MIG-77777"
    assert handle_of(2).uuid == B  # by the bus
    assert device_index("GPU-cccc") == 0
    assert device_index("MIG-777") == 1
    assert device_index(None) == device_index("cuda") == 1


def test_a_mig_device_is_not_taken_for_its_card(
    machine: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.cards[0].migs = [FakeCard("MIG-5")]
    properties = SimpleNamespace(uuid="unknown", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setitem(__import__("sys").modules, "torch", started(properties))
    with pytest.raises(Unavailable, match="does not find this MIG device"):
        handle_of(0)
