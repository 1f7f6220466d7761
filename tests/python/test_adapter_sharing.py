# SPDX-License-Identifier: BSD-3-Clause
"""Sharing as the adapter does it, over simulated devices: the bytes, the receiver, what it refuses.

A simulated device exists in one process, so here a process receives what it shared itself, through
descriptors that it takes from itself as it would from another. The rest: tests/gpu/test_sharing.py.
"""

import ast
import os
import textwrap

import pytest
from torch_tools import GIB, MIB, SIMULATED, program, simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]

HELPERS = """
import os, struct
share, open_, MiB = adapter._sim_share, adapter._sim_open, 1 << 20
NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
def parse(text):
    version, kind = text[0], chr(text[1])
    form = "<iiQQii" if version == 3 or kind == "g" else "<iiQQ"
    end = 2 + struct.calcsize(form)
    return version, kind, struct.unpack(form, text[2:end]), text[end:]
def refused(text, *parts, device=0):
    try:
        open_(device, text)
    except RuntimeError as error:
        for part in parts:
            assert part in str(error), (part, str(error))
        return
    raise AssertionError(f"opened {text!r}")
"""


def sharing(text: str) -> list[object]:
    out = simulated(HELPERS + "\n" + textwrap.dedent(text))
    return [ast.literal_eval(line) for line in out.splitlines()]


def test_the_bytes_are_those_of_torch() -> None:
    sharing(
        """
        a = alloc(100 * MIB)
        offset, text = share(a)
        version, kind, header, handles = parse(text)
        assert (version, kind) == (3 if NEW else 2, "e")
        assert header[:2] == (os.getpid(), 0)
        size, count = header[2:4]
        assert size % (2 * MIB) == 0 and size * count >= 100 * MIB
        assert header[4:] == ((1, 0) if NEW else ())
        assert len(handles) == 4 * count
        for fd in struct.unpack(f"<{count}i", handles):
            os.fstat(fd)  # open in this process
        assert offset == 0
        assert adapter.paths(0)["rebacked"] == count
        """
    )


def test_the_bytes_of_one_memory_stay_the_same() -> None:
    # Receivers find by them what they have mapped already.
    sharing(
        """
        a, b = alloc(300), alloc(5000)
        (first, text), (second, same) = share(a), share(b)
        assert text == same and second - first == b - a
        big = alloc(100 * MIB)
        before = share(big)
        assert share(big) == before
        free(big)
        assert alloc(100 * MIB) == big and share(big) == before
        """
    )


def test_a_receiver_maps_each_memory_once() -> None:
    sharing(
        """
        a = alloc(100 * MIB)
        _, text = share(a)
        one, two = open_(0, text), open_(0, text)
        assert one.address == two.address != a
        calls = lambda: adapter.driver_figures(0)["calls"]["unmap"]
        before = calls()
        one.close()
        assert calls() == before
        three = open_(0, text)
        assert three.address == two.address
        two.close(), three.close()
        assert calls() > before
        four = open_(0, text)
        four.close()
        """
    )


def test_what_is_received_is_among_the_addresses() -> None:
    # So memory_info() does not take it for this process's.
    sharing(
        """
        a = alloc(100 * MIB)
        offset, text = share(a)
        opened = open_(0, text)
        places = (opened.address, opened.address + 50 * MIB, opened.address + 100 * MIB - 1)
        has = lambda at: any(b <= at < b + n for b, n in adapter.address_ranges())
        assert all(map(has, places)), (places, adapter.address_ranges())
        assert (opened.address, 1) in adapter.address_ranges()
        opened.close()
        assert not any(map(has, places)), (places, adapter.address_ranges())
        """
    )


def test_what_torch_up_to_2_12_wrote_is_read() -> None:
    sharing(
        """
        a = alloc(100 * MIB)
        _, text = share(a)
        version, kind, header, handles = parse(text)
        old = bytes([2]) + b"e" + struct.pack("<iiQQ", *header[:4]) + handles
        new = bytes([3]) + b"e" + struct.pack("<iiQQii", *header[:4], 1, 0) + handles
        for form in (old, new):
            open_(0, form).close()
        """
    )


def test_handles_of_several_sizes_are_read() -> None:
    sharing(
        """
        texts = [share(alloc(size * MIB))[1] for size in (1, 64)]
        parts = [parse(t) for t in texts]
        assert parts[0][2][2] != parts[1][2][2]
        handles = b""
        count = 0
        for _, _, header, fds in parts:
            for fd in struct.unpack(f"<{header[3]}i", fds):
                handles += struct.pack("<Qii", header[2], fd, 0)
                count += 1
        text = bytes([3]) + b"g" + struct.pack("<iiQQii", os.getpid(), 0, 0, count, 1, 0) + handles
        opened = open_(0, text)
        assert opened.address
        opened.close()
        refused(text[:-4], "names", "handles")
        """
    )


def test_a_tensor_that_stock_torch_cannot_receive_is_warned_about_once() -> None:
    done = program(
        SIMULATED
        + textwrap.dedent(HELPERS)
        + textwrap.dedent(
            """
            free(alloc(10 * MIB))
            low, middle, high = (alloc(mib * MIB + 512) for mib in (9, 12, 9))
            free(middle)
            assert [parse(share(a)[1])[1] for a in (low, high)] == ["e", "e"]
            assert alloc(12 * MIB + 512) == middle
            offset, text = share(middle)
            assert parse(text)[1] == "g" and share(middle) == (offset, text)
            open_(0, text).close()
            """
        )
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("handles of several sizes") == 1
    assert "GPUMEMX_CONF=mode:plain" in done.stderr


def test_what_is_no_handle_is_refused() -> None:
    sharing(
        """
        a = alloc(100 * MIB)
        _, text = share(a)
        refused(b"", "cut off")
        refused(text[:20], "cut off")
        refused(text[:-1], "names")
        refused(text + b"1234", "names")
        refused(bytes([9]) + text[1:], "future version of torch")
        refused(text[:1] + b"x" + text[2:], "unknown type")
        version, kind, header, handles = parse(text)
        strange = bytes([3]) + b"e" + struct.pack("<iiQQii", *header[:4], 7, 0) + handles
        refused(strange, "not known here: 7")
        none = bytes([3]) + b"e" + struct.pack("<iiQQii", header[0], 0, header[2], 0, 1, 0)
        refused(none, "names 0 handles")
        # A fabric handle, by its kind and (before version 3) by its length; not simulated.
        fabric = struct.pack("<iiQQii", header[0], 0, header[2], 1, 2, 0) + bytes(64)
        refused(bytes([3]) + b"e" + fabric, "no fabric")
        refused(bytes([2]) + b"e" + fabric[:24] + bytes(64), "no fabric")
        # Not memory at all.
        other = os.open("/dev/null", os.O_RDONLY)
        wrong = bytes([3]) + b"e" + struct.pack("<iiQQii", header[0], 0, header[2], 1, 1, 0)
        refused(wrong + struct.pack("<i", other), "can't map CUDA memory", "no memory behind")
        open_(0, text).close()  # all the same
        """
    )


def test_a_producer_that_has_ended_is_named() -> None:
    sharing(
        """
        import subprocess, sys
        a = alloc(MIB)
        _, text = share(a)
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        gone = text[:2] + struct.pack("<i", child.pid) + text[6:]
        refused(gone, str(child.pid), "has ended", "PID namespace")
        """
    )


def test_memory_that_was_freed_before_it_was_received_is_an_error() -> None:
    sharing(
        """
        a = alloc(100 * MIB)
        _, text = share(a)
        version, kind, header, handles = parse(text)
        closed = text[:-4] + struct.pack("<i", 100_000)
        refused(closed, f"process {os.getpid()}", "freed before it was received")
        # Its descriptor may be another file by then.
        free(a)
        gpumemx.clear_cache(0)
        refused(text, "CUDA memory")
        """
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take its own rights away")
def test_without_ptrace_rights_the_error_says_what_to_do() -> None:
    sharing(
        """
        import subprocess, sys
        a = alloc(MIB)
        _, text = share(a)
        code = "\\n".join((
            "import os",
            "from gpumemx import _adapter",
            "adapter = _adapter.load()",
            "adapter.install('', {}, simulated_devices=1, simulated_bytes=1 << 30)",
            "os.setgroups([]), os.setgid(65534), os.setuid(65534)",
            "try:",
            f"    adapter._sim_open(0, {text!r})",
            "except RuntimeError as error:",
            "    print(error)",
        ))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        for part in (f"process {os.getpid()}", "ptrace rights", "SYS_PTRACE", "mode:plain"):
            assert part in done.stdout, (part, done.stdout, done.stderr)
        """
    )


def test_other_pointers_cant_be_shared() -> None:
    sharing(
        """
        a = alloc(MIB)
        opened = open_(0, share(a)[1])
        for address in (0x1234, opened.address):
            try:
                share(address)
                raise AssertionError("shared")
            except RuntimeError as error:
                assert "invalid device pointer" in str(error), error
        free(a)
        try:
            share(a)
            raise AssertionError("shared")
        except RuntimeError as error:
            assert "in no block in use" in str(error), error
        """
    )


def test_shared_memory_is_in_nobodys_way() -> None:
    # Shares, receives and frees in turn, while another thread allocates. (Now and then what that
    # one has makes handles of one size impossible, which is said.)
    done = program(
        SIMULATED
        + HELPERS
        + textwrap.dedent("""
        import random, threading
        stop = False
        def churn():
            pick = random.Random(1)
            held = []
            while not stop:
                held.append(alloc(pick.randrange(1, 60) * 1_000_000))
                if len(held) > 8:
                    free(held.pop(pick.randrange(len(held))))
            for address in held:
                free(address)
        thread = threading.Thread(target=churn)
        thread.start()
        pick = random.Random(2)
        held = []
        for _ in range(300):
            a = alloc(pick.choice((1000, 100_000, 3_000_000, 30_000_000, 66 * MIB)))
            held.append((a, open_(0, share(a)[1])))
            if len(held) > 12:
                a, opened = held.pop(pick.randrange(len(held)))
                opened.close()
                free(a)
        for a, opened in held:
            opened.close()
            free(a)
        stop = True
        thread.join()
        assert gpumemx.memory_info(0).live == 0
        """)
    )
    assert done.returncode == 0, done.stderr
    assert all("handles of several sizes" in line for line in done.stderr.splitlines())


def test_peers_get_access_to_all_memory_now_and_later() -> None:
    sharing(
        """
        a = alloc(100 * MIB)
        calls = lambda: adapter.driver_figures(0)["calls"]["set_access"]
        before = calls()
        adapter._sim_add_peer(0, 1)
        assert calls() > before
        after = calls()
        adapter._sim_add_peer(0, 1)
        assert calls() == after
        alloc(200 * MIB)
        try:
            adapter._sim_add_peer(0, 5)
            raise AssertionError("device 5 is not there")
        except RuntimeError as error:
            assert "device 5 can't be given access to the memory of device 0" in str(error), error
        """
    )


def test_a_block_at_an_address() -> None:
    sharing(
        """
        at = adapter._sim_alloc_at
        a = alloc(64 * MIB)
        free(a)
        at(0, 1000, 1, a + MIB)
        assert gpumemx.memory_info(0).live == 1024
        taken, odd, foreign = a + MIB, a + 1, 0x200000
        for address, part in ((taken, "exact address"), (odd, "multiple of 512"),
                              (foreign, "exact address")):
            try:
                at(0, 512, 1, address)
                raise AssertionError("allocated")
            except RuntimeError as error:
                assert part in str(error), error
        free(a + MIB)
        gpumemx.clear_cache(0)
        at(0, 64 * MIB, 1, a)
        free(a)
        """
    )


def test_the_base_of_an_allocation_and_the_largest_block() -> None:
    base, size, idle, given, fresh = sharing(
        """
        a, b = alloc(64 * MIB), alloc(64 * MIB)
        assert b == a + 64 * MIB
        base, size = adapter._sim_base(b)
        print(base - a), print(size)
        free(b)
        print(adapter._sim_cache_info(0, 1)), print(adapter._sim_cache_info(0, 1 << 40))
        print(adapter._sim_cache_info(0, 0))
        try:
            adapter._sim_base(0x1000)
            raise AssertionError("that is nobody's memory")
        except RuntimeError as error:
            assert "invalid device pointer" in str(error), error
        """
    )
    assert (base, size) == (0, 128 * MIB)
    assert (idle, given) == (64 * MIB, 1 << 40)
    assert fresh == 8 * GIB - 128 * MIB
