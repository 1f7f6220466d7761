# SPDX-License-Identifier: BSD-3-Clause
"""Random collectives on memory that is registered with NCCL, and on what comes to its addresses.

Two ranks make collectives (random_collectives.py) whose tensors are all in one memory pool, before
it is registered with the communicators and after, while the default heaps harvest. Then the pool
goes, and collectives go on with memory from everywhere: a registration that outlived its memory
would move old words.

    ordinary   torch.cuda.MemPool()
    whole      torch.cuda.MemPool(no_split=True): each tensor a device allocation
    nccl       the pool of NCCL's own allocator, backend.mem_allocator
    left       ordinary, and not deregistered before it goes

python registered_pools.py KIND [--count N] [--allocator A]

Prints a line. Exit status 1 when an element is wrong, or a registered segment has moved.
"""

from __future__ import annotations

import argparse
import sys

from random_collectives import MIB, Churn, Collectives, Streams, add_sizes, dist
from two_ranks import (
    FEW_BLOCKS,
    RANKS,
    add_arguments,
    handles_moved,
    join,
    results_of,
    run_ranks,
    tell,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("ordinary", "whole", "nccl", "left"))
    add_arguments(parser)
    parser.add_argument("--count", type=int, default=150, help="of each of four parts (150)")
    add_sizes(parser)
    parser.set_defaults(longest_mib=16, live_mib=512)
    return parser.parse_args()


def be_a_rank(args: argparse.Namespace) -> dict:
    device = join(args)
    import torch

    streams = Streams(device)
    work = Collectives(args, device, streams)
    churn = Churn(1000 + args.seed * RANKS + args.rank, device, streams, args.live_mib * MIB)
    backends = [group._get_backend(device) for group in work.groups]
    allocator = backends[0].mem_allocator if args.kind == "nccl" else None
    pools = [torch.cuda.MemPool(allocator, no_split=args.kind == "whole")]
    torch.cuda.synchronize()

    def some(first: int, where) -> None:
        for key in range(first, first + args.count):
            with torch.cuda.use_mem_pool(where) if where else torch.cuda.device(device):
                work.make(key)
            for _ in range(4):
                churn.step()

    def places() -> dict[int, int]:
        return {segment["address"]: segment["total_size"] for segment in pools[0].snapshot()}

    some(0, pools[0])
    registered = places()
    for backend in backends:
        backend.register_mem_pool(pools[0])
    some(args.count, pools[0])
    torch.cuda.synchronize()
    now = places()
    # What has come since may have made a segment longer.
    moved = [a for a, size in registered.items() if a not in now or now[a] < size]
    some(2 * args.count, pools[0])
    work.finish()
    torch.cuda.synchronize()
    if args.kind != "left":
        for backend in backends:
            backend.deregister_mem_pool(pools[0])
    pools.clear()
    torch.cuda.empty_cache()
    some(3 * args.count, None)
    work.finish()
    churn.empty()
    torch.cuda.synchronize()
    result = {
        "done": 4 * args.count,
        "elements": work.elements + churn.elements,
        "wrong": int(sum(int(w) for w in streams.wrong)),
        "moved": len(moved),
        "segments": len(registered),
        "handles": handles_moved(device),
    }
    dist().destroy_process_group()
    return result


def main() -> int:
    args = arguments()
    if args.rank is not None:
        return tell(be_a_rank(args))
    results = results_of(run_ranks(__file__, sys.argv[1:], limit=200, **FEW_BLOCKS))
    if len(results) < RANKS:
        return 1
    wrong, moved = sum(r["wrong"] for r in results), sum(r["moved"] for r in results)
    print(
        f"{args.kind} on {args.allocator}: {results[0]['done']:,} collectives, "
        f"{sum(r['elements'] for r in results):,} elements checked, {wrong} wrong; "
        f"{sum(r['segments'] for r in results)} segments registered, {moved} moved; "
        f"handles moved {results[0]['handles']} and {results[1]['handles']}"
    )
    return int(wrong > 0 or moved > 0 or results[0]["segments"] == 0)


if __name__ == "__main__":
    sys.exit(main())
