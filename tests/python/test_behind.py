# SPDX-License-Identifier: BSD-3-Clause
"""Case A26: what stands behind a pointer, and that it stays there."""

import textwrap

import gpumemx
import pytest
from torch_tools import SIMULATED, output, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]


def test_a_block_tells_its_memory_and_keeps_it() -> None:
    simulated(
        """
        import gpumemx
        class View:                                   # a tensor that begins inside of its block
            def data_ptr(self): return a + 5 * MIB
        a = alloc(100 * MIB + 1)
        m = gpumemx.memory_behind(View())
        assert (m.device, m.address, m.size) == (0, a, 100 * MIB + 512), m
        assert m == gpumemx.memory_behind(a)
        assert not m.plain and not m.registrable and m.handle_types == ("posix_fd",), m
        assert m.base <= a and m.base + m.extent >= a + m.size
        assert len(m.handles) > 1
        at = m.base
        for address, size in m.handles:               # side by side, in whole pages
            assert address == at and size % (2 * MIB) == 0, m
            at += size
        assert at == m.base + m.extent
        for _ in range(3):                            # harvested beside it
            others = [alloc(33 * MIB) for _ in range(20)]
            for other in others: free(other)
        assert gpumemx.memory_behind(a) == m
        free(a)
        try:
            gpumemx.memory_behind(a)
        except ValueError as error:
            assert f"0x{a:x} is in no block" in str(error)
        else:
            raise AssertionError
        """
    )


def test_plain_memory_is_one_allocation_that_can_be_registered() -> None:
    output(
        SIMULATED.replace('install(""', 'install("mode:plain"')
        + textwrap.dedent("""
        a = alloc(3 * MIB)
        m = gpumemx.memory_behind(a)
        assert m.plain and m.registrable and m.handle_types == ("cuda_ipc",), m
        assert m.handles == ((m.base, m.extent),)
        assert m.to_dict()["handles"] == m.handles
        """)
    )


def test_without_gpumemx_it_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"not torch's allocator .*install_allocator"):
        gpumemx.memory_behind(4096)
