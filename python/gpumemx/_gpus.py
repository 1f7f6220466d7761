# SPDX-License-Identifier: BSD-3-Clause
"""Cards by name, and what they leave to a program.

``total`` is what torch reports for the card (``get_device_properties(0).total_memory``, "total
capacity" in its out-of-memory messages), with ECC on where it is by default. Drivers differ by up
to 0.2 GiB; the figures are of recent ones. What a program can reserve is less by CUDA's context and
the kernels that torch, cuBLAS and cuDNN load: half a GiB is taken off, for a card that nothing else
uses. Both are estimates. A screen on the card, or NCCL, takes more.
"""

import difflib
import re
from dataclasses import dataclass

_MIB = 1 << 20
_CONTEXT = 512 * _MIB


@dataclass(frozen=True)
class Gpu:
    """A card. Sizes in bytes."""

    name: str
    total: int
    """What torch reports for it."""

    @property
    def usable(self) -> int:
        """Estimate of what torch can reserve on it."""
        return self.total - _CONTEXT


# GiB as torch prints them.
_TOTALS = {
    "GTX 1080 Ti": 10.90,
    "RTX 2080 Ti": 10.75,
    "RTX 3060 12GB": 11.63,
    "RTX 3070": 7.66,
    "RTX 3080 10GB": 9.63,
    "RTX 3090": 23.56,
    "RTX 4060 8GB": 7.62,
    "RTX 4060 Ti 16GB": 15.57,
    "RTX 4070": 11.60,
    "RTX 4080": 15.57,
    "RTX 4090": 23.52,
    "RTX 5070 Ti": 15.46,
    "RTX 5080": 15.46,
    "RTX 5090": 31.36,
    "RTX A4000": 15.61,
    "RTX A5000": 23.55,
    "RTX A6000": 47.40,
    "RTX 6000 Ada": 47.37,
    "RTX PRO 6000": 94.97,
    "P100-16GB": 15.89,
    "T4": 14.56,
    "V100-16GB": 15.77,
    "V100-32GB": 31.73,
    "A10": 22.06,
    "A10G": 22.06,
    "A30": 23.53,
    "A40": 44.40,
    "L4": 22.03,
    "L40": 44.40,
    "L40S": 44.40,
    "A100-40GB": 39.38,
    "A100-80GB": 79.14,
    "H100-80GB": 79.11,
    "H100-NVL-94GB": 93.02,
    "H20-96GB": 95.00,
    "GH200-96GB": 94.50,
    "H200": 139.80,
    "B200": 178.35,
}

GPUS = tuple(Gpu(name, round(gib * 1024) * _MIB) for name, gib in _TOTALS.items())

# What a name without a size means where one is far more common.
_COMMON = {"v100": "V100-16GB", "h100": "H100-80GB"}


def _plain(name: str) -> str:
    """Return the name without what people write differently: case, spaces, dashes, the maker."""
    word = re.sub(r"[\s_-]+", "", name.lower())
    for prefix in ("nvidia", "geforce", "tesla", "rtx", "gtx"):
        word = word.removeprefix(prefix)
    return word.replace("gib", "gb")


def find_gpu(name: str) -> Gpu:
    """Return the card of that name. ``RTX 4090``, ``rtx4090`` and ``4090`` are one card.

    Raises
    ------
    ValueError
        There is no such card; the text has the nearest name.
    """
    known = {_plain(gpu.name): gpu for gpu in GPUS}
    word = _plain(name)
    word = _plain(_COMMON.get(word, word))
    for candidate in (word, f"{word}gb"):
        if candidate in known:
            return known[candidate]
    # A name without its size, where only one card has it: "RTX 3080".
    sizes = [gpu for plain, gpu in known.items() if re.fullmatch(re.escape(word) + r"\d+gb", plain)]
    if word and len(sizes) == 1:
        return sizes[0]
    if word and sizes:
        names = " and ".join(gpu.name for gpu in sizes)
        raise ValueError(f"'{name}' does not say which card: there are {names}")
    nearest = max(known, key=lambda plain: difflib.SequenceMatcher(None, word, plain).ratio())
    raise ValueError(
        f"there is no card '{name}'; the nearest name is '{known[nearest].name}'. "
        "Of any other card give what it has as the capacity"
    )
