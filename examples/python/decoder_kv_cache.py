# SPDX-License-Identifier: BSD-3-Clause
"""Train a small decoder and generate from it with a key-value cache that grows.

    python decoder_kv_cache.py --gpumemx     with gpumemx; without the flag, torch's own
    gpumemx run decoder_kv_cache.py          the same, the program unchanged

Prints the most memory that was live and reserved, and steps a second. --print-losses prints each
step's loss exactly, to compare two runs with --deterministic; --tiny is a size for a try on a CPU.
"""

import argparse
import os
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Cache = list[tuple[Tensor, Tensor]]


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each with its norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, cache: Cache | None, index: int) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if index < len(cache):
                # The cache grows by a token at a time: a new tensor, and the old one is freed.
                k, v = torch.cat((cache[index][0], k), 2), torch.cat((cache[index][1], v), 2)
                cache[index] = (k, v)
            else:
                cache.append((k, v))
        # One new token sees all that is cached.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        before = cache[0][0].shape[2] if cache else 0
        places = torch.arange(before, before + tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for index, layer in enumerate(self.layers):
            x = layer(x, cache, index)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int) -> Tensor:
        """Return `count` more tokens, the likeliest each time."""
        cache: Cache = []
        token = self(prompt, cache)[:, -1:].argmax(-1)
        made = [token]
        for _ in range(count - 1):
            token = self(token, cache)[:, -1:].argmax(-1)
            made.append(token)
        return torch.cat(made, 1)


def train(
    steps: int, batch: int, device: torch.device, *, tiny: bool, seed: int
) -> Iterator[Tensor]:
    """Train on random texts and generate after each step; yield loss plus a sum over the tokens."""
    vocabulary, width, depth, heads, longest = (
        (100, 32, 2, 2, 64) if tiny else (32000, 768, 8, 12, 512)
    )
    model = Decoder(vocabulary, width, depth, heads, longest).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lengths = random.Random(seed)
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (batch, longest // 2 + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        del logits
        prompt = tokens[:, : lengths.randint(4, longest // 2)]
        made = model.generate(prompt, lengths.randint(4, longest // 8))
        yield loss.detach() + made.sum() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small decoder and generate with a growing KV cache."
    )
    parser.add_argument("--gpumemx", action="store_true", help="install gpumemx's allocator")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deterministic", action="store_true", help="the same sums every time")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--print-losses", action="store_true", help="one a step, as hex floats")
    parser.add_argument("--print-memory", action="store_true", help="bytes after each step")
    args = parser.parse_args()

    if args.gpumemx:
        import gpumemx

        gpumemx.install_allocator()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Of the ways to compute attention only this one is deterministic for every shape.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)

    warm_up = min(5, args.steps // 2)
    begin = 0.0
    losses = []
    for step, loss in enumerate(
        train(args.steps, args.batch, device, tiny=args.tiny, seed=args.seed)
    ):
        losses.append(loss)
        if args.print_memory and device.type == "cuda":
            stats = torch.cuda.memory_stats(device)
            names = ("requested_bytes", "allocated_bytes", "reserved_bytes")
            print("memory", step + 1, *(stats[f"{name}.all.current"] for name in names))
        if step + 1 == warm_up or step + 1 == args.steps:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin, end = (
                (time.perf_counter(), 0.0) if step + 1 == warm_up else (begin, time.perf_counter())
            )
    if args.print_losses:
        for step, loss in enumerate(losses):
            print("loss", step + 1, float(loss).hex())
    if device.type == "cuda":
        print(f"peak live {torch.cuda.max_memory_allocated(device) / 2**20:.1f} MiB")
        print(f"peak reserved {torch.cuda.max_memory_reserved(device) / 2**20:.1f} MiB")
    else:
        print("peak live and reserved: not counted on a CPU")
    if args.steps > warm_up > 0:
        print(f"{(args.steps - warm_up) / (end - begin):.2f} steps/s")


if __name__ == "__main__":
    main()
