# SPDX-License-Identifier: BSD-3-Clause
"""Training loops on random data whose sizes change from step to step.

Each yields the number of items (tokens, pixels) after every step. The sizes come from a seed of the
loop's own, so every run asks for the same. `scale` makes the batches (llm: the texts) larger. The
data is made on the device and no loss is read, so no loop waits for the device by itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

sys.path.append(str(Path(__file__).parents[2] / "examples" / "python"))
from train_resnet50 import resnet

Loop = Callable[[int, float, torch.device, bool], Iterator[int]]


def mixed(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


# --- bert: an encoder is fine-tuned; a batch is as long as its longest text


class Encoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.layers(x)[:, 0])


def bert(steps: int, scale: float, device: torch.device, tiny: bool) -> Iterator[int]:
    vocabulary, width, depth, heads, longest = (
        (100, 32, 2, 2, 48) if tiny else (30522, 768, 12, 12, 512)
    )
    with device:
        model = Encoder(vocabulary, width, depth, heads, longest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    sizes = random.Random(3)
    for _ in range(steps):
        batch = max(1, int(sizes.choice([2, 3] if tiny else [32, 48, 64]) * scale))
        drawn = [int(sizes.lognormvariate(4.2, 0.7)) for _ in range(64)]
        length = min(longest, max(drawn[: sizes.choice([8, 64])]))
        tokens = torch.randint(vocabulary, (batch, length), device=device)
        labels = torch.randint(2, (batch,), device=device)
        with mixed(device):
            loss = F.cross_entropy(model(tokens), labels)
        update(optimizer, loss)
        yield batch * length


# --- llm: a decoder of 1.1 billion parameters is trained on texts of all lengths


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of channels by its place's angle."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class DecoderLayer(nn.Module):
    """Causal attention, several heads to a key and value, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.size).transpose(1, 2)

        def spread(y: Tensor) -> Tensor:
            shape = (batch, self.groups, self.heads // self.groups, length, self.size)
            return y[:, :, None].expand(shape).flatten(1, 2)

        q, k = rotate(split(self.q(x)), angles), rotate(split(self.k(x)), angles)
        y = F.scaled_dot_product_attention(q, spread(k), spread(split(self.v(x))), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(
        self, vocabulary: int, width: int, depth: int, heads: int, groups: int, inner: int
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, groups, inner) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        steps = torch.arange(0, self.size, 2, device=tokens.device) / self.size
        angles = places[:, None] * 10000.0**-steps
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


def llm(steps: int, scale: float, device: torch.device, tiny: bool) -> Iterator[int]:
    vocabulary, width, depth, heads, groups, inner = (
        (100, 32, 2, 4, 2, 64) if tiny else (32000, 2048, 22, 32, 4, 5632)
    )
    with device:
        model = Decoder(vocabulary, width, depth, heads, groups, inner).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sizes = random.Random(4)
    for _ in range(steps):
        length = int((sizes.randrange(8, 64) if tiny else sizes.randrange(256, 4096)) * scale)
        batch = sizes.choice([1, 2, 3])
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        update(optimizer, loss)
        yield batch * length


# --- unet: a diffusion network on images of several sizes and shapes


class Convolutions(nn.Module):
    """Two 3x3 convolutions, each behind its norm, beside a 1x1 one."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, inner),
            nn.SiLU(),
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(8, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
        )
        self.shortcut = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class UNet(nn.Module):
    """Down to an eighth, attention there, and up again beside what came down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 3 * width, 4 * width]
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(map(Convolutions, [width, *widths[:-1]], widths))
        self.attention = nn.MultiheadAttention(widths[-1], 8, batch_first=True)
        self.up = nn.ModuleList(
            Convolutions(below + beside, beside)
            for below, beside in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        beside = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.avg_pool2d(x, 2))
            beside.append(x)
        beside.pop()
        flat = x.flatten(2).transpose(1, 2)
        flat = flat + self.attention(flat, flat, flat, need_weights=False)[0]
        x = flat.transpose(1, 2).reshape(x.shape)
        for block in self.up:
            other = beside.pop()
            x = block(torch.cat([F.interpolate(x, size=other.shape[-2:]), other], 1))
        return self.last(x)


def unet(steps: int, scale: float, device: torch.device, tiny: bool) -> Iterator[int]:
    with device:
        model = UNet(8 if tiny else 96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sizes = random.Random(7)
    choices = range(16, 49, 16) if tiny else range(128, 449, 64)
    for _ in range(steps):
        batch = max(1, int(sizes.choice([1, 2] if tiny else [4, 8, 12]) * scale))
        height, width = sizes.choice(choices), sizes.choice(choices)
        images = torch.randn(batch, 3, height, width, device=device)
        with mixed(device):
            loss = F.mse_loss(model(images).float(), images)
        update(optimizer, loss)
        yield batch * height * width


# --- resnet50 at many sizes, resnet152 at one


def train_resnet(
    depths: tuple[int, ...],
    shapes: Iterator[tuple[int, int]],
    device: torch.device,
    tiny: bool,
) -> Iterator[int]:
    depths, width, classes = ((1, 1, 1, 1), 8, 10) if tiny else (depths, 64, 1000)
    with device:
        model = resnet(depths, width, classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch, size in shapes:
        images = torch.randn(batch, 3, size, size, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(classes, (batch,), device=device)
        with mixed(device):
            loss = F.cross_entropy(model(images), labels)
        update(optimizer, loss)
        yield batch * size * size


def resnet50(steps: int, scale: float, device: torch.device, tiny: bool) -> Iterator[int]:
    sizes = random.Random(1)
    batches, edges = ([2, 3], range(32, 97, 32)) if tiny else ([64, 96, 128], range(128, 353, 32))
    drawn = [(sizes.choice(batches), sizes.choice(edges)) for _ in range(steps)]
    shapes = ((max(1, int(batch * scale)), size) for batch, size in drawn)
    return train_resnet((3, 4, 6, 3), shapes, device, tiny)


def resnet152(steps: int, scale: float, device: torch.device, tiny: bool) -> Iterator[int]:
    batch, size = (2, 64) if tiny else (128, 224)
    shapes = ((max(1, int(batch * scale)), size) for _ in range(steps))
    return train_resnet((3, 8, 36, 3), shapes, device, tiny)


LOOPS: dict[str, Loop] = {
    "bert": bert,
    "llm": llm,
    "unet": unet,
    "resnet50": resnet50,
    "resnet152": resnet152,
}


def begin(name: str, steps: int, scale: float = 1.0, *, tiny: bool = False) -> Iterator[int]:
    """Start a loop from its seed, on the device, or on the CPU when tiny."""
    torch.manual_seed(0)
    return LOOPS[name](steps, scale, torch.device("cpu" if tiny else "cuda"), tiny)
