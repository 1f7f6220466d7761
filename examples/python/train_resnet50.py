# SPDX-License-Identifier: BSD-3-Clause
"""Train ResNet-50 on random images.

    python train_resnet50.py --gpumemx     with gpumemx; without the flag, torch's own
    gpumemx run train_resnet50.py          the same, the program unchanged

Prints the most memory that was live and reserved, and steps a second. --print-losses prints each
step's loss exactly, to compare two runs with --deterministic; --tiny is a size for a try on a CPU.
"""

import argparse
import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut; the stride is in the middle one."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(depths: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Return a ResNet; depths (3, 4, 6, 3) and width 64 is ResNet-50."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inner = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            layers.append(Bottleneck(inner, width << stage, 2 if i == 0 and stage > 0 else 1))
            inner = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


def train(steps: int, batch: int, device: torch.device, *, tiny: bool) -> Iterator[Tensor]:
    """Train on random images; yield each step's loss."""
    depths, width, size, classes = (
        ((1, 1, 1, 1), 8, 64, 10) if tiny else ((3, 4, 6, 3), 64, 224, 1000)
    )
    model = resnet(depths, width, classes).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        images = torch.randn(batch, 3, size, size, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(classes, (batch,), device=device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train ResNet-50 on random images.")
    parser.add_argument("--gpumemx", action="store_true", help="install gpumemx's allocator")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
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
    for step, loss in enumerate(train(args.steps, args.batch, device, tiny=args.tiny)):
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
