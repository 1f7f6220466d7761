# SPDX-License-Identifier: BSD-3-Clause
"""Every kind of file that is no usable trace, and what must be said about it."""

import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from conftest import arrays

Make = Callable[[Path], None]


def npz(**changed: object) -> Make:
    return lambda path: np.savez_compressed(path, **arrays(**changed))


def without(key: str) -> Make:
    def make(path: Path) -> None:
        kept = arrays()
        del kept[key]
        np.savez_compressed(path, **kept)

    return make


def cut(share: float) -> Make:
    def make(path: Path) -> None:
        npz()(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * share)])

    return make


def npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(3))


def flipped(path: Path) -> None:
    """Damage the stored bytes of an array: the archive's checksum does not match."""
    np.savez(path, **arrays())
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<q", 32 << 20))
    data[at] ^= 0xFF
    path.write_bytes(data)


def member(name: str, content: bytes) -> Make:
    """Make an archive that has everything, with one member replaced."""

    def make(path: Path) -> None:
        np.savez(path.with_suffix(".tmp.npz"), **arrays())
        with (
            zipfile.ZipFile(path.with_suffix(".tmp.npz")) as source,
            zipfile.ZipFile(path, "w") as target,
        ):
            for other in source.namelist():
                if other not in (name, name + ".npy"):
                    target.writestr(other, source.read(other))
            target.writestr(name, content)
        path.with_suffix(".tmp.npz").unlink()

    return make


def huge_header(path: Path) -> None:
    """Claim 2**60 elements and bring none."""
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846976,), }"
    header += b" " * (117 - len(header)) + b"\n"
    member("op.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)(path)


INT64_MAX = 2**63 - 1
_OBJECTS = np.array([{}, [], None, 1], dtype=object)

# name: (how the file is made, what its line must contain)
BAD_FILES: dict[str, tuple[Make, str]] = {
    "missing": (lambda path: None, "No such file or directory"),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
    "empty": (lambda path: path.write_bytes(b"") and None, "not an .npz file"),
    "text": (lambda path: path.write_text("op,size\n") and None, "not an .npz file"),
    "npy": (npy, "not an .npz file"),
    "pickle": (
        lambda path: path.write_bytes(pickle.dumps(arrays())) and None,
        "it asks for code: 'numpy",
    ),
    "other_archive": (
        lambda path: np.savez(path, weights=np.zeros(3)),
        "not a trace: it has no array 'op'",
    ),
    "cut_header": (cut(0.02), "truncated or damaged"),
    "cut_half": (cut(0.5), "truncated or damaged"),
    "cut_end": (cut(0.98), "truncated or damaged"),
    "flipped": (flipped, "truncated or damaged"),
    "member_text": (member("op", b"0 1 2"), "'op' is not an array"),
    "member_broken": (member("op.npy", b"\x93NUMPY\x01\x00\xff"), "truncated or damaged"),
    "huge_header": (huge_header, "truncated or damaged"),
    "no_op": (without("op"), "not a trace: it has no array 'op'"),
    "no_size": (without("size"), "not a trace: it has no array 'size'"),
    "no_stream": (without("stream"), "not a trace: it has no array 'stream'"),
    "no_time": (without("time_us"), "not a trace: it has no array 'time_us'"),
    "no_slots": (without("slots"), "not a trace: it has no array 'slots'"),
    "objects": (npz(op=_OBJECTS), "it has an array of Python objects, which is never read"),
    "object_slots": (
        npz(slots=np.array({}, dtype=object)),
        "it has an array of Python objects, which is never read",
    ),
    "float_size": (
        npz(size=np.zeros(4)),
        "'size' is 1-dimensional of float64, not 1-dimensional of int64",
    ),
    "narrow_op": (
        npz(op=np.array([0, 1, ~0, ~1], np.int32)),
        "'op' is 1-dimensional of int32, not 1-dimensional of int64",
    ),
    "wide_stream": (
        npz(stream=np.zeros(4, np.int64)),
        "'stream' is 1-dimensional of int64, not 1-dimensional of int16",
    ),
    "big_endian": (npz(time_us=np.zeros(4, ">i8")), "'time_us' is 1-dimensional of >i8"),
    "two_dimensions": (
        npz(op=np.zeros((2, 2), np.int64)),
        "'op' is 2-dimensional of int64, not 1-dimensional of int64",
    ),
    "no_dimension": (npz(op=np.int64(0)), "'op' is 0-dimensional of int64"),
    "float_slots": (npz(slots=2.0), "'slots' is 0-dimensional of float64, not one whole number"),
    "many_slots": (npz(slots=np.zeros(2, np.int64)), "'slots' is 1-dimensional of int64"),
    "negative_slots": (npz(slots=np.int64(-1)), "slots is -1; it must not be negative"),
    "huge_slots": (npz(slots=np.uint64(2**64 - 1)), f"slots is {INT64_MAX}; at most"),
    "unequal": (
        npz(size=np.zeros(3, np.int64)),
        "the arrays have unequal lengths: op 4, size 3, stream 4, time_us 4",
    ),
    "negative_size": (
        npz(size=np.array([1, -5, 1, 1], np.int64)),
        "event 1: size is -5; it must not be negative",
    ),
    "negative_stream": (
        npz(stream=np.array([0, -2, 0, 0], np.int16)),
        "event 1: stream is -2; it must not be negative",
    ),
    "out_of_range": (
        npz(op=np.array([0, 9, ~0, ~9], np.int64)),
        "event 1: slot 9 is out of range; slots is 2",
    ),
    "free_first": (
        npz(op=np.array([~0, 0, 1, ~1], np.int64)),
        "event 0: slot 0 is freed but not allocated",
    ),
    "freed_twice": (
        npz(op=np.array([0, ~0, ~0, 1], np.int64)),
        "event 2: slot 0 is freed but not allocated",
    ),
    "allocated_twice": (
        npz(op=np.array([0, 0, ~0, 1], np.int64)),
        "event 1: slot 0 is allocated again before it was freed",
    ),
    "time_back": (
        npz(time_us=np.array([0, 5, 4, 6], np.int64)),
        "event 2: time_us goes back from 5 to 4",
    ),
}

# An extra member is no mistake.
EXTRA_MEMBER = member("notes.txt", b"hello")
