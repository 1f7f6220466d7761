# SPDX-License-Identifier: BSD-3-Clause
"""Reading trace files: the good ones as they are, every other with one clear line."""

import pickle
from pathlib import Path

import gpumemx
import numpy as np
import pytest
from bad_files import BAD_FILES, EXTRA_MEMBER
from conftest import arrays
from gpumemx.trace import Trace


def test_a_good_file_comes_back_as_it_was_written(good: Path) -> None:
    trace = gpumemx.load_trace(good)
    expected = arrays()
    for name in ("op", "size", "stream", "time_us"):
        np.testing.assert_array_equal(getattr(trace, name), expected[name])
        assert getattr(trace, name).dtype == expected[name].dtype
        assert not getattr(trace, name).flags.writeable
    assert (trace.slots, len(trace), trace.path) == (2, 4, str(good))


def test_an_extra_member_is_no_mistake(tmp_path: Path) -> None:
    EXTRA_MEMBER(tmp_path / "extra.npz")
    assert len(gpumemx.load_trace(tmp_path / "extra.npz")) == 4


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_clear_line(kind: str, tmp_path: Path) -> None:
    make, text = BAD_FILES[kind]
    path = tmp_path / f"{kind}.npz"
    make(path)
    with pytest.raises(gpumemx.TraceError) as caught:
        gpumemx.load_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert text in message
    assert "\n" not in message
    assert len(message) < len(str(path)) + 200


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "exploded",)

    path = tmp_path / "bomb.npz"
    np.savez(path, **arrays(op=np.array([Bomb()], dtype=object)))
    with pytest.raises(gpumemx.TraceError):
        gpumemx.load_trace(path)
    assert not (tmp_path / "exploded").exists()


def test_every_cut_of_a_file_is_refused(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    path = tmp_path / "cut.npz"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(gpumemx.TraceError):
            gpumemx.load_trace(path)


def test_every_damaged_byte_is_refused_or_harmless(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    path = tmp_path / "damaged.npz"
    refused = 0
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 0x5A
        path.write_bytes(damaged)
        try:
            assert len(gpumemx.load_trace(path)) == 4
        except gpumemx.TraceError:
            refused += 1
    assert refused > 100


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(gpumemx.TraceError("a.npz", "bad\nfile")))
    assert (error.path, error.reason, str(error)) == ("a.npz", "bad file", "a.npz: bad file")


def test_arrays_of_ones_own_are_checked_at_use() -> None:
    made = arrays()
    made["slots"] = 2
    assert gpumemx.replay(Trace(**made)).events == 4
    made["op"] = np.arange(8)[::2]
    with pytest.raises(gpumemx.TraceError, match="'op' is not contiguous"):
        gpumemx.replay(Trace(**made))
    made["op"] = [0, 1, ~0, ~1]
    with pytest.raises(gpumemx.TraceError, match="'op' is list, not an array"):
        gpumemx.replay(Trace(**made))
