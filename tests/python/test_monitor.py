# SPDX-License-Identifier: BSD-3-Clause
"""gpumemx.monitor: figures, nesting, functions, and what it says when nothing is measured."""

import ast
import asyncio

import gpumemx
import pytest
from torch_tools import MIB, output, simulated

torch_too = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]


def needs_adapter(test):  # type: ignore[no-untyped-def]
    for mark in torch_too:
        test = mark(test)
    return test


# --- without torch in this process


def test_without_torch_all_is_zero_and_it_says_so() -> None:
    text = """
    import gpumemx
    with gpumemx.monitor("load") as m:
        assert (m.before, m.after, m.allocated, m.peak, m.delta) == (0, 0, 0, 0, 0)
    assert (m.driver_calls, m.driver_time, m.allocations, m.exact) == (0, 0.0, 0, False)
    print(m.report())
    """
    assert output(text).startswith("load: nothing to measure: PyTorch is not ")


def test_it_prints_nothing_and_calls_back_also_after_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[gpumemx.GPUMonitor] = []
    with pytest.raises(KeyError), gpumemx.monitor("fails", on_exit=seen.append) as m:
        raise KeyError
    assert seen == [m]
    assert capsys.readouterr() == ("", "")


def test_a_monitor_that_has_not_run_says_so() -> None:
    assert gpumemx.monitor("x").report() == "x: nothing to measure: it has not run yet"


def test_functions_keep_their_name_value_and_errors() -> None:
    runs: list[str] = []

    @gpumemx.monitor("add", on_exit=lambda m: runs.append(m.name))
    def add(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    assert (add(1), add(1, b=3)) == (3, 4)
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    with pytest.raises(TypeError):
        add("a")  # type: ignore[arg-type]
    assert runs == ["add"] * 3

    @gpumemx.monitor
    def bare() -> str:
        return "value"

    assert bare() == "value"
    assert bare.monitor.name.endswith("bare")  # type: ignore[attr-defined]

    @gpumemx.monitor()
    def recursive(n: int) -> int:
        return n if n == 0 else recursive(n - 1)

    assert recursive(5) == 0


def test_coroutines_are_measured_while_they_run() -> None:
    order: list[str] = []

    @gpumemx.monitor(on_exit=lambda m: order.append("measured"))
    async def work() -> int:
        await asyncio.sleep(0)
        order.append("worked")
        return 3

    assert asyncio.run(work()) == 3
    assert order == ["worked", "measured"]


def test_generators_are_refused() -> None:
    def generator():  # type: ignore[no-untyped-def]
        yield

    with pytest.raises(TypeError, match="measures no generator"):
        gpumemx.monitor("x")(generator)


@pytest.mark.parametrize(
    ("device", "error"),
    [
        (-1, ValueError),
        ("cpu", ValueError),
        ("cuda:x", ValueError),
        (True, TypeError),
        ([], TypeError),
    ],
)
def test_a_wrong_device_is_an_error(device: object, error: type[Exception]) -> None:
    with pytest.raises(error), gpumemx.monitor("x", device=device):  # type: ignore[call-overload]
        pass


# --- with gpumemx


@needs_adapter
def test_the_figures_are_exact() -> None:
    figures = ast.literal_eval(
        simulated(
            """
            before = alloc(2 * MIB)
            with gpumemx.monitor("step") as m:
                a, b = alloc(10 * MIB), alloc(1000)
                assert m.allocated == 12 * MIB + 1024
                free(a)
                c = alloc(3 * MIB)
            late = alloc(50 * MIB)
            assert m.exact and m.driver_time > 0
            print({k: v for k, v in m.to_dict().items() if k != "driver_time"})
            """
        )
    )
    assert figures.pop("driver_calls") > 0
    assert figures == {
        "name": "step",
        "device": 0,
        "before": 2 * MIB,
        "after": 5 * MIB + 1024,
        "delta": 3 * MIB + 1024,
        "peak": 12 * MIB + 1024,
        "allocations": 3,
        "exact": True,
    }


@needs_adapter
def test_scopes_nest_and_leave_other_peaks_alone() -> None:
    simulated(
        """
        kept = alloc(MIB)
        with gpumemx.monitor("outer") as outer:
            a = alloc(20 * MIB); free(a)
            with gpumemx.monitor("inner") as inner:
                b = alloc(5 * MIB); free(b)
                with gpumemx.monitor("empty") as empty:
                    pass
            c = alloc(10 * MIB); free(c)
        assert (outer.peak, inner.peak, empty.peak) == (21 * MIB, 6 * MIB, MIB)
        assert (outer.delta, inner.delta, empty.delta) == (0, 0, 0)
        assert torch._C._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"] == 21 * MIB
        torch._C._cuda_resetPeakMemoryStats(0)
        with gpumemx.monitor("again") as again:
            free(alloc(3 * MIB))
            torch._C._cuda_resetPeakMemoryStats(0)
        assert again.peak == 4 * MIB
        """
    )


@needs_adapter
def test_a_scope_from_before_the_first_allocation_misses_nothing() -> None:
    simulated(
        """
        with gpumemx.monitor("outer") as outer:
            with gpumemx.monitor("inner") as inner:
                a, b = alloc(100 * MIB), alloc(10 * MIB)
                free(b)
            free(a)
        assert (outer.peak, inner.peak) == (110 * MIB, 110 * MIB)
        assert outer.driver_calls >= inner.driver_calls > 0
        """
    )


@needs_adapter
def test_scopes_of_threads_overlap() -> None:
    simulated(
        """
        import threading
        peaks = []
        def work():
            with gpumemx.monitor("thread") as m:
                for _ in range(200):
                    free(alloc(MIB))
            peaks.append(m.peak)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert all(MIB <= peak <= 4 * MIB for peak in peaks), peaks
        """
    )


@needs_adapter
def test_each_device_is_measured_alone() -> None:
    simulated(
        """
        with gpumemx.monitor("0", device=0) as a, gpumemx.monitor("1", device="cuda:1") as b, \\
             gpumemx.monitor("2", device=torch.device("cuda", 1)) as c:
            alloc(MIB, device=1)
        assert (a.peak, b.peak, c.peak) == (0, MIB, MIB)
        assert (a.device, b.device, c.device) == (0, 1, 1)
        try:
            with gpumemx.monitor("3", device=2):
                pass
            raise AssertionError("there is no third device")
        except IndexError as error:
            assert "there is no CUDA device 2; this process has 2" in str(error), error
        """
    )


@needs_adapter
def test_the_report_is_one_line() -> None:
    assert simulated(
        """
        @gpumemx.monitor("step")
        def step():
            free(alloc(100 * MIB))
            return alloc(30 * MIB)
        step(), step()
        print(step.monitor.report())
        """
    ).startswith("step: peak 130.00 MiB, kept +30.00 MiB, ")


@needs_adapter
def test_torchs_own_allocator_before_cuda_is_zeros() -> None:
    text = output(
        """
        import torch, gpumemx
        with gpumemx.monitor("x") as m:
            torch.ones(100).sum()
        assert (m.peak, m.delta, m.driver_calls, m.exact) == (0, 0, 0, False)
        assert not torch.cuda.is_initialized()
        print(m.report())
        """
    )
    assert text.startswith("x: nothing to measure: ")
    assert "CUDA" in text


@needs_adapter
def test_torch_may_be_imported_inside_the_scope() -> None:
    output(
        """
        import gpumemx
        with gpumemx.monitor("all") as m:
            import torch
            from gpumemx import _adapter
            adapter = _adapter.load()
            adapter.install("", {}, simulated_devices=1, simulated_bytes=8 << 30)
            a = adapter._sim_alloc(0, 3 << 20, 1)
            adapter._sim_free(adapter._sim_alloc(0, 5 << 20, 1))
        assert (m.before, m.after, m.peak) == (0, 3 << 20, 8 << 20), m.to_dict()
        """
    )
