# SPDX-License-Identifier: BSD-3-Clause
"""Write a large memory snapshot, as Python's pickle writes one, without holding it in memory.

    python benchmarks/big_snapshot.py big.pickle --size 1GB
    /usr/bin/time -v python -c "from gpumemx import _core; _core.analyze_snapshot('big.pickle')"

A made-up training run: 200 layers that allocate forward and free backward, every step anew, with
some frames an allocation. Its figures are known: each step has the same peak, in its middle.
"""

import argparse
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

LAYERS = 200
SLOT = 8 << 20  # each layer's block stands in its own slot
BASE = 0x7F0000000000
BATCH = 1000  # items between two APPENDS, as pickle writes them
MEMOIZE = b"\x94"
FIRST_TEXT = 3  # memo slots before: the whole, the key and the list of the texts


def block_size(layer: int) -> int:
    return (1 << 20) + layer * 4096 + 512 * (layer % 7)


LIVE_PEAK = sum(map(block_size, range(LAYERS)))


class Writer:
    """Opcodes of protocol 4. Texts come from the memo, as where pickle writes one again."""

    def __init__(self) -> None:
        self.memo: dict[str, int] = {}

    def text(self, text: str) -> bytes:
        slot = self.memo.setdefault(text, len(self.memo) + FIRST_TEXT)
        return b"h" + bytes([slot]) if slot < 256 else b"j" + struct.pack("<I", slot)

    def all_texts(self) -> bytes:
        """Write those that were asked for so far; each takes the memo's next slot."""
        items = b""
        for text in self.memo:
            data = text.encode()
            items += b"\x8c" + bytes([len(data)]) + data + MEMOIZE
        return b"]" + MEMOIZE + b"(" + items + b"e"

    @staticmethod
    def number(n: int) -> bytes:
        return pickle.dumps(n, 2)[2:-1]

    def mapping(self, items: dict[str, bytes]) -> bytes:
        pairs = b"".join(self.text(key) + value for key, value in items.items())
        return b"}" + MEMOIZE + b"(" + pairs + b"u"

    @staticmethod
    def sequence(items: list[bytes]) -> bytes:
        return b"]" + MEMOIZE + (b"(" + b"".join(items) + b"e" if items else b"")


def frames(writer: Writer, layer: int, count: int) -> bytes:
    stack = [("/home/user/model/layers.py", "forward", 100 + layer)]
    module = "site-packages/torch/nn/modules/module.py"
    stack += [(module, "_call_impl", 1700 + i) for i in range(count - 2)]
    stack += [("/home/user/train.py", "main", 42)]
    del stack[count:]
    return writer.sequence(
        [
            writer.mapping(
                {
                    "name": writer.text(name),
                    "filename": writer.text(file),
                    "line": writer.number(line),
                }
            )
            for file, name, line in stack
        ]
    )


def entry(writer: Writer, action: str, layer: int, size: int, time_us: int, stack: bytes) -> bytes:
    return writer.mapping(
        {
            "action": writer.text(action),
            "addr": writer.number(BASE + layer * SLOT),
            "size": writer.number(size),
            "stream": writer.number(0),
            "time_us": writer.number(time_us),
            "compile_context": writer.text("N/A"),
            "user_metadata": writer.text(""),
            "frames": stack,
        }
    )


def entries(writer: Writer, frame_count: int) -> Iterator[bytes]:
    """Yield the run, without an end."""
    time_us = 1_700_000_000_000_000
    stacks = [frames(writer, layer, frame_count) for layer in range(LAYERS)]
    empty = writer.sequence([])
    for layer in range(LAYERS):
        yield entry(writer, "segment_alloc", layer, SLOT, time_us, empty)
    while True:
        for layer in range(LAYERS):
            time_us += 90
            yield entry(writer, "alloc", layer, block_size(layer), time_us, stacks[layer])
        for layer in reversed(range(LAYERS)):
            time_us += 90
            size = block_size(layer)
            yield entry(writer, "free_requested", layer, size, time_us, stacks[layer])
            yield entry(writer, "free_completed", layer, size, time_us, empty)


def write(path: Path, size: int, frame_count: int) -> int:
    """Write a snapshot of about `size` bytes and return its number of entries."""
    count = 0
    writer = Writer()
    run = entries(writer, frame_count)
    segments = writer.sequence([segment(writer, layer) for layer in range(LAYERS)])
    heads = writer.text("segments") + segments + writer.text("device_traces")
    # The whole run's texts are in its first two steps.
    batch = [next(run) for _ in range(2 * 3 * LAYERS)]
    with path.open("wb", buffering=1 << 20) as file:
        # The texts come first, under a key that no torch writes.
        file.write(b"\x80\x04}" + MEMOIZE + b"(\x8c\x05texts" + MEMOIZE + writer.all_texts())
        file.write(heads + b"]" + MEMOIZE + b"]" + MEMOIZE)
        for item in run:
            batch.append(item)
            if len(batch) >= BATCH:
                file.write(b"(" + b"".join(batch) + b"e")
                count += len(batch)
                batch.clear()
                if file.tell() >= size:
                    break
        file.write(b"au.")
    return count


def segment(writer: Writer, layer: int) -> bytes:
    block = {
        "address": writer.number(BASE + layer * SLOT),
        "size": writer.number(SLOT),
        "requested_size": writer.number(0),
        "state": writer.text("inactive"),
        "frames": writer.sequence([]),
    }
    return writer.mapping(
        {
            "device": writer.number(0),
            "address": writer.number(BASE + layer * SLOT),
            "total_size": writer.number(SLOT),
            "stream": writer.number(0),
            "segment_type": writer.text("large"),
            "is_expandable": b"\x89",
            "blocks": writer.sequence([writer.mapping(block)]),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", default="1GB", help="such as 1GB or 20MB (default: 1GB)")
    parser.add_argument("--frames", type=int, default=10, help="of an allocation (default: 10)")
    args = parser.parse_args()
    units = {"GB": 10**9, "MB": 10**6, "KB": 10**3}
    size = int(float(args.size[:-2]) * units[args.size[-2:].upper()])
    count = write(args.file, size, args.frames)
    print(f"{args.file}: {args.file.stat().st_size:,} bytes, {count:,} entries")


if __name__ == "__main__":
    main()
