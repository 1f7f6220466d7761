# SPDX-License-Identifier: BSD-3-Clause
"""How serving engines size their cache: as much of it on gpumemx as on torch's own allocator.

They load a model, run the largest batch once to see the peak, empty the cache, read how much of the
device is free, take nearly all of that for the key-value cache, and capture a graph for each batch
size in one pool. (vLLM does so in determine_available_memory() and capture_model().)

python -m pytest tests/gpu/test_serving.py, with the built package on PYTHONPATH. Without a device
it is skipped; GPUMEMX_REQUIRE_GPU=1 makes that a failure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "python"
sys.path.insert(0, str(TOOLS))

from torch_tools import program, require_device  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

MIB = 1 << 20
LEEWAY = 64 * MIB

ENGINE = """
import gc, json, torch
WIDTH, DEPTH, SHARE = 4096, 12, 0.6
torch.manual_seed(1)
def linear(inputs, outputs):
    return torch.nn.Linear(inputs, outputs, device="cuda", dtype=torch.half)
model = torch.nn.Sequential(*(
    torch.nn.Sequential(linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), linear(4 * WIDTH, WIDTH))
    for _ in range(DEPTH))).requires_grad_(False)

# The profile run.
torch.cuda.reset_peak_memory_stats()
for tokens in (16384, 100, 9000):
    model(torch.randn(tokens, WIDTH, dtype=torch.half, device="cuda"))
torch.cuda.synchronize()
gc.collect()
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
others = total - free - torch.cuda.memory_reserved()
available = int(total * SHARE) - peak - others

# The cache: a tensor a layer.
blocks = available // DEPTH // (2 << 20)
cache = [torch.zeros(blocks, 1 << 20, dtype=torch.half, device="cuda") for _ in range(DEPTH)]

# Graphs, the largest first, all in one pool.
static = torch.randn(256, WIDTH, dtype=torch.half, device="cuda")
model(static)
torch.cuda.synchronize()
graphs, pool = {}, None
for batch in (256, 128, 64, 32, 16, 8, 4, 2, 1):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = model(static[:batch])
    pool = graph.pool()
    graphs[batch] = graph, out
torch.cuda.synchronize()
gc.collect()
torch.cuda.empty_cache()
left = torch.cuda.mem_get_info()[0]
for batch in (1, 64, 256, 2):
    static.copy_(torch.randn_like(static))
    graph, out = graphs[batch]
    graph.replay()
    torch.testing.assert_close(out, model(static[:batch]))
assert all(not bool(layer.any()) for layer in cache)
print("RESULT", json.dumps({"cache": sum(c.numel() * 2 for c in cache), "left": left}))
"""


def figures(install: str) -> dict[str, int]:
    done = program(install + ENGINE)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, int] = json.loads(result)
    return found


def test_the_cache_is_as_large_as_on_torchs_own() -> None:
    require_device()
    native = figures("")
    ours = figures("import gpumemx; gpumemx.install_allocator()\n")
    print({"torch": native, "gpumemx": ours})
    assert ours["cache"] >= native["cache"] - LEEWAY
    # And after it, with the graphs captured, as much of the device is free.
    lost = native["left"] + native["cache"] - ours["left"] - ours["cache"]
    assert lost <= LEEWAY, f"{lost / MIB:.1f} MiB less are left"
