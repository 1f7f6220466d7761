# SPDX-License-Identifier: BSD-3-Clause
"""A decoder is trained on two devices by DDP and by FSDP2, on each allocator in turn.

steps/s         of the slower rank, median of the runs; in brackets, of the first allocator's. The
                first third of the steps is not in the time
live, reserved  most bytes of a rank over the runs, MiB, and reserved by live; a pair for two ranks
losses          whether each rank's, at each step, are those of the first allocator, to the bit

Both ranks have the same start and texts of their own, whose lengths change from step to step.
--checkpoint on: each layer's activations are made again in the backward pass.

python distributed.py [--runs N] [--steps N] [--allocators NAME ...] [--ways ddp fsdp]
                      [--checkpoint off on]
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness import MIB, Job, Result, Worker, add_arguments, median, serve, show, table

RANKS = 2
WAYS = ("ddp", "fsdp")
# vocabulary, width, layers, heads, groups, inner
SIZES = (32000, 2048, 12, 32, 8, 5632)
TINY = (100, 32, 2, 4, 2, 64)


# --- in a worker: one job is one rank


def decoder(job: Job, device: Any) -> Any:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )
    from workloads import Decoder, DecoderLayer

    torch.manual_seed(0)
    with device:
        model = Decoder(*(TINY if job["tiny"] else SIZES)).to(torch.bfloat16)
    if job["checkpoint"]:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, DecoderLayer))
    if job["way"] == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            model, device_ids=None if job["tiny"] else [device], gradient_as_bucket_view=True
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def work(job: Job) -> Result:
    """Train as one rank. The allocator of this process is chosen, and CUDA was not started."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F  # noqa: N812

    rank, tiny = job["rank"], job["tiny"]
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if not tiny:
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a kernel a tensor
    dist.init_process_group(
        "gloo" if tiny else "nccl",
        store=dist.FileStore(job["store"], RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),  # for a rank whose other one has failed
        device_id=None if tiny else device,
    )
    model = decoder(job, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    sizes = random.Random(5 + rank)
    torch.manual_seed(100 + rank)
    vocabulary, lengths = (TINY[0], (8, 64)) if tiny else (SIZES[0], (256, 2048))
    losses: list[Any] = []
    begin, first = 0.0, job["steps"] // 3
    for step in range(job["steps"]):
        if step == first:
            settle(tiny)
            begin = time.perf_counter()
        length, batch = sizes.randrange(*lengths), sizes.choice([2, 3, 4])
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        del loss
    settle(tiny)
    result: Result = {
        "rate": (job["steps"] - first) / (time.perf_counter() - begin),
        "losses": [loss.item().hex() for loss in losses],
    }
    if not tiny:
        result["live"] = torch.cuda.max_memory_allocated() / MIB
        result["reserved"] = torch.cuda.max_memory_reserved() / MIB
    dist.barrier()
    dist.destroy_process_group()
    return result


def settle(tiny: bool) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier()
    if not tiny:
        torch.cuda.synchronize()


# --- in the parent


def run_once(workers: list[Worker], **job: Any) -> list[Result]:
    """Let one worker a rank train, both at a time."""
    with tempfile.TemporaryDirectory(prefix="distributed-") as folder:
        store = str(Path(folder, "store"))
        for rank, worker in enumerate(workers):
            worker.send(rank=rank, store=store, **job)
        return [worker.receive() for worker in workers]


def row(who: str, runs: list[list[Result]], first: list[list[Result]]) -> list[str]:
    def rate(among: list[list[Result]]) -> float:
        return median(min(rank["rate"] for rank in run) for run in among)

    live, ratios = [], []
    for rank in range(RANKS):
        figures = [run[rank] for run in runs if "live" in run[rank]]
        if figures:
            most = max(figures, key=lambda f: f["reserved"])
            live.append(f"{most['live']:,.0f}")
            ratios.append(f"{most['reserved']:,.0f} ({most['reserved'] / most['live']:.4f})")
    wanted = [rank["losses"] for rank in first[0]] if first else []
    same = all([rank["losses"] for rank in run] == wanted for run in runs)
    count = len(wanted[0]) if wanted else 0
    return [
        who,
        f"{show(rate(runs), '.2f')} ({show(rate(runs) / rate(first), '.3f')})",
        ", ".join(show(min(rank["rate"] for rank in run), ".2f") for run in runs),
        " / ".join(live) or "-",
        " / ".join(ratios) or "-",
        f"{count} {'equal' if same else 'DIFFER'}" if runs else "-",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, runs=3)
    parser.set_defaults(allocators=["native", "expandable", "gpumemx"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--checkpoint", nargs="+", choices=("off", "on"), default=["off", "on"])
    args = parser.parse_args()
    if args.serve:
        import torch.distributed.fsdp  # noqa: F401  (before the fork, like torch)

        serve(args.serve, work, device_is_started=False)
        return 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
    differ = False
    with ExitStack() as stack:
        workers = {
            who: [stack.enter_context(Worker(who)) for _ in range(RANKS)] for who in args.allocators
        }
        for way in args.ways:
            for checkpoint in args.checkpoint:
                runs: dict[str, list[list[Result]]] = defaultdict(list)
                for _ in range(args.runs):
                    for who, ranks in workers.items():
                        results = run_once(
                            ranks,
                            way=way,
                            checkpoint=checkpoint == "on",
                            steps=args.steps,
                            tiny=args.tiny,
                        )
                        failed = [r["failed"] for r in results if "failed" in r]
                        if failed:
                            print(f"{way}, checkpoint {checkpoint}, {who}: {failed}", flush=True)
                        else:
                            runs[who].append(results)
                print(f"\n{way}, checkpoint {checkpoint}, {args.steps} steps")
                first = runs[args.allocators[0]]
                head = ["", "steps/s", "each", "live", "reserved", "losses"]
                rows = [row(who, runs[who], first) for who in workers]
                table(head, rows)
                differ = differ or any("DIFFER" in cells[-1] for cells in rows)
    return int(differ)


if __name__ == "__main__":
    raise SystemExit(main())
