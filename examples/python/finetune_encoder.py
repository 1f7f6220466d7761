# SPDX-License-Identifier: BSD-3-Clause
"""Fine-tune a BERT-sized encoder on random texts of very different lengths.

    python finetune_encoder.py --gpumemx     with gpumemx; without the flag, torch's own
    gpumemx run finetune_encoder.py          the same, the program unchanged

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


class Encoder(nn.Module):
    """Token and place embeddings, transformer layers, and a classifier on the first token."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, is_padding: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        return self.head(self.layers(x, src_key_padding_mask=is_padding)[:, 0])


def train(
    steps: int, batch: int, device: torch.device, *, tiny: bool, seed: int
) -> Iterator[Tensor]:
    """Fine-tune on batches that are as long as their longest text; yield each step's loss."""
    vocabulary, width, depth, heads, longest = (
        (100, 32, 2, 2, 48) if tiny else (30522, 768, 12, 12, 384)
    )
    model = Encoder(vocabulary, width, depth, heads, longest).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    lengths = random.Random(seed)
    for _ in range(steps):
        # Most texts are short, a few are long.
        drawn = [min(longest, 8 + int(lengths.expovariate(4 / longest))) for _ in range(batch)]
        length = torch.tensor(drawn, device=device)
        tokens = torch.randint(vocabulary, (batch, max(drawn)), device=device)
        is_padding = torch.arange(max(drawn), device=device) >= length[:, None]
        labels = torch.randint(2, (batch,), device=device)
        loss = F.cross_entropy(model(tokens, is_padding), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a BERT-sized encoder.")
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
