# SPDX-License-Identifier: BSD-3-Clause
"""What NCCL holds for the process groups of torch.distributed, over groups that are made up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from gpumemx import _nccl, _outside

MIB = 1 << 20


class Cuda:
    """torch.cuda, as far as it is asked."""

    def __init__(self) -> None:
        self.current = 0
        self.was_current = {0}
        self.nccl = SimpleNamespace(version=lambda: (2, 30, 7))

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.was_current.add(index)
        yield
        self.current = before


class Driver(_outside.Driver):
    def __init__(self, contexts: tuple[int, ...] = (0,)) -> None:
        self.contexts = contexts

    def device_count(self) -> int | None:
        return 4

    def has_context(self, device: int) -> bool:
        return device in self.contexts


class ProcessGroupNCCL:
    """A backend whose communicators stand at these addresses, by device."""

    def __init__(self, cuda: Cuda, addresses: dict[int, int], total: int = 0, **more: Any) -> None:
        self.cuda = cuda
        self.addresses = addresses
        self.stats = {"suspend": 0, "suspended": 0, "persist": total, "total": total}
        self.complete = bool(addresses)
        self.error = "SUCCESS"
        self.bound_device_id: Any = None
        self.options = SimpleNamespace(
            config=SimpleNamespace(blocking=1 if addresses else -(1 << 31), split_share=-(1 << 31))
        )
        self.asked: list[str] = []
        self.__dict__.update(more)

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)

    def _is_initialized(self) -> bool:
        return self.complete

    def _comm_ptr(self) -> int:
        self.asked.append("_comm_ptr")
        assert self.complete or self.options.config.blocking != 0, "this would wait"
        return self.addresses.get(self.cuda.current, 0)

    def memory_stats(self) -> dict[str, int]:
        self.asked.append("memory_stats")
        assert self.addresses, "there is no communicator"
        return self.stats


class ProcessGroupNCCLOfOld(ProcessGroupNCCL):
    @property
    def memory_stats(self) -> Any:  # type: ignore[override]
        raise AttributeError("torch before 2.12")


class ProcessGroupNCCL2:
    pass


class ProcessGroupGloo:
    pass


class Group:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: str) -> Any:
        assert device == "cuda"
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


Groups = Callable[..., None]


@pytest.fixture
def groups(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Groups:
    def put_in_place(*backends: Any) -> None:
        world = SimpleNamespace(pg_map={Group(backend): "nccl" for backend in backends})
        torch = SimpleNamespace(device=str, cuda=cuda)
        monkeypatch.setitem(_nccl.sys.modules, "torch", torch)
        c10d = SimpleNamespace(_world=world)
        monkeypatch.setitem(_nccl.sys.modules, "torch.distributed.distributed_c10d", c10d)

    for name in _nccl._SHARING:
        monkeypatch.delenv(name, raising=False)
    return put_in_place


def held(index: int = 0, *contexts: int) -> _nccl.Held:
    return _nccl.held(index, Driver(contexts or (0,)))


def test_without_torch_distributed_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_nccl.sys.modules, "torch.distributed.distributed_c10d", raising=False)
    assert held() == _nccl.Held()


def test_groups_without_nccl_hold_nothing(groups: Groups) -> None:
    groups(ProcessGroupGloo(), None)
    assert held() == _nccl.Held()


def test_one_communicator(cuda: Cuda, groups: Groups) -> None:
    groups(ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB))
    assert held() == _nccl.Held(40 * MIB)
    assert held(1) == _nccl.Held()


def test_behind_the_wrapper_of_torchs_debug_mode(cuda: Cuda, groups: Groups) -> None:
    groups(SimpleNamespace(wrapped_pg=ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB)))
    assert held() == _nccl.Held(40 * MIB)


def test_communicators_of_several_groups_and_devices(cuda: Cuda, groups: Groups) -> None:
    groups(
        ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB),
        ProcessGroupNCCL(cuda, {0: 0x20}, 30 * MIB),
        ProcessGroupNCCL(cuda, {2: 0x30}, 7 * MIB),
        ProcessGroupNCCL(cuda, {0: 0x20}, 30 * MIB),  # the same one, in another group
        ProcessGroupNCCL(cuda, {}),
        None,
    )
    assert held(0, 0, 2) == _nccl.Held(70 * MIB)
    assert held(2, 0, 2) == _nccl.Held(7 * MIB)
    assert held(3, 0, 2) == _nccl.Held()
    assert cuda.current == 0
    assert cuda.was_current == {0, 2}, "a context would have been made on the others"


def test_no_communicator_is_made_where_there_is_none(cuda: Cuda, groups: Groups) -> None:
    backend = ProcessGroupNCCL(cuda, {})
    groups(backend)
    assert held() == _nccl.Held()
    assert backend.asked == []


def test_nccl_that_is_too_old_is_not_asked(cuda: Cuda, groups: Groups) -> None:
    backend = ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB)
    groups(backend, ProcessGroupNCCL(cuda, {}))
    for version in ((2, 28, 9), (2, 29, 3), (2, 29, 3, "+cuda13")):
        cuda.nccl.version = lambda version=version: version
        numbers = ".".join(map(str, version[:3]))
        reason = f"NCCL {numbers} does not tell what it holds, 2.29.7 does"
        assert held() == _nccl.Held(unknown=reason)
    assert backend.asked == ["_comm_ptr"] * 3
    assert held(1) == _nccl.Held(), "there is none on that device"
    cuda.nccl.version = lambda: (2, 29, 7)
    assert held() == _nccl.Held(40 * MIB)


def test_torch_that_does_not_ask(cuda: Cuda, groups: Groups) -> None:
    groups(ProcessGroupNCCLOfOld(cuda, {0: 0x10}, 40 * MIB))
    assert held().unknown == "this torch does not ask NCCL, 2.12 does"


def test_a_backend_that_asks_without_a_lock(cuda: Cuda, groups: Groups) -> None:
    groups(ProcessGroupNCCL2())
    assert held().unknown == "communicators of ProcessGroupNCCL2 are not asked"
    cuda.nccl.version = lambda: (2, 21, 5)  # as old versions of torch, which show no communicators
    assert held().unknown == "NCCL 2.21.5 does not tell what it holds, 2.29.7 does"


def test_communicators_that_would_make_it_wait_are_not_asked(cuda: Cuda, groups: Groups) -> None:
    failed = ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB, error="TIMEOUT")
    groups(failed)
    assert held().unknown == "a communicator has failed (TIMEOUT)"
    begun = ProcessGroupNCCL(cuda, {0: 0x20}, 40 * MIB, complete=False)
    begun.options.config.blocking = 0
    groups(begun)
    assert held().unknown == "a communicator is not complete yet"
    assert failed.asked == begun.asked == []
    begun.complete = True
    assert held() == _nccl.Held(40 * MIB)


def test_one_that_was_destroyed_says_so(cuda: Cuda, groups: Groups) -> None:
    def gone() -> int:
        raise RuntimeError("NCCL communicator was aborted on rank 0. \nException raised from x")

    groups(ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB, _comm_ptr=gone))
    assert held().unknown == "NCCL: NCCL communicator was aborted on rank 0"
    groups(ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB, memory_stats=gone))
    assert held().unknown == "NCCL: NCCL communicator was aborted on rank 0"


def test_torch_tells_of_one_device_of_a_group(cuda: Cuda, groups: Groups) -> None:
    several = "a process group has communicators on several devices, torch tells of one"
    groups(ProcessGroupNCCL(cuda, {0: 0x10, 1: 0x20}, 40 * MIB))
    assert held(0, 0, 1).unknown == held(1, 0, 1).unknown == several
    bound = SimpleNamespace(index=1)
    groups(ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB, bound_device_id=bound))
    assert held().unknown == several
    groups(ProcessGroupNCCL(cuda, {1: 0x10}, 40 * MIB, bound_device_id=bound))
    assert held(1, 0, 1) == _nccl.Held(40 * MIB)


def test_suspended_memory_is_with_the_driver(cuda: Cuda, groups: Groups) -> None:
    backend = ProcessGroupNCCL(cuda, {0: 0x10})
    backend.stats = {"suspend": 30 * MIB, "suspended": 0, "persist": 10 * MIB, "total": 40 * MIB}
    groups(backend)
    assert held() == _nccl.Held(40 * MIB)
    backend.stats["suspended"] = 1
    assert held() == _nccl.Held(10 * MIB)


def test_figures_that_cannot_be_right(cuda: Cuda, groups: Groups) -> None:
    # It allocates through cudaMalloc() then, and counts only what it maps itself.
    groups(ProcessGroupNCCL(cuda, {0: 0x10}, 0))
    assert "NCCL_CUMEM_ENABLE=0" in held().unknown
    groups(ProcessGroupNCCL(cuda, {0: 0x10}, (1 << 64) - 2 * MIB))
    assert held().unknown == "NCCL has counted below zero"


def test_communicators_that_share_memory_count_it_twice(
    cuda: Cuda, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = ProcessGroupNCCL(cuda, {0: 0x10}, 40 * MIB)
    child = ProcessGroupNCCL(cuda, {0: 0x20}, 40 * MIB)
    child.options.config.split_share = 1
    groups(child)
    assert held() == _nccl.Held(40 * MIB), "it is alone"
    groups(parent, child)
    assert "split_share" in held().unknown
    child.options.config.split_share = 0
    assert held() == _nccl.Held(80 * MIB)
    monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")
    assert "split_share" in held().unknown
