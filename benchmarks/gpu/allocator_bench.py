# SPDX-License-Identifier: BSD-3-Clause
"""What an allocation costs in C++, through torch's interface, with each allocator in turn.

pairs     nanoseconds for an allocation and a free: by size class, large sizes that cycle with 16
          alive, random sizes with random lifetimes; on 1, 4 and 16 threads; freed by another
          thread. In brackets the driver calls that gpumemx waited for, which are part of it
traces    recorded runs: reserved / live, nanoseconds an event the first time and later, driver
          time, and the smallest cap that fits with the time there
checked   the same programs and traces with every byte written and read again, and reserved memory
          beside what the driver says is gone, at 100 moments

python allocator_bench.py [--sections pairs traces checked] [--traces FILE...] [--runs N]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    ALLOCATORS,
    GIB,
    MIB,
    Job,
    Result,
    Worker,
    add_arguments,
    driver_figures,
    median,
    serve,
    set_cap,
    show,
    table,
)
from numpy.typing import NDArray

ALONE = "loop alone"  # no allocator: what the loop itself costs
TRACES = Path(__file__).parents[2] / "examples" / "traces"
Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int16], int]

# --- programs


def replacing(slots: list[int], sizes: list[int], alive: int) -> Columns:
    """For each slot in turn, free what it holds and allocate the size that goes with it."""
    op, size = np.empty(2 * len(slots), np.int64), np.zeros(2 * len(slots), np.int64)
    op[0::2], op[1::2] = ~np.array(slots, np.int64), slots
    size[1::2] = sizes
    return op, size, np.zeros(len(op), np.int16), alive


def cycling(sizes: list[int], alive: int, pairs: int, begin: int = 0) -> Columns:
    """Sizes in turn, the block freed that is the oldest of `alive`."""
    turn = range(begin, begin + pairs)
    return replacing([i % alive for i in turn], [sizes[i % len(sizes)] for i in turn], alive)


def random_lifetimes(low: int, high: int, alive: int, pairs: int) -> Columns:
    """Sizes as likely in each octave; the block freed is any of those alive."""
    pick = random.Random(1)
    first = list(range(alive))
    pick.shuffle(first)
    slots = first + [pick.randrange(alive) for _ in range(pairs - alive)]
    return replacing(slots, [int(low * (high / low) ** pick.random()) for _ in slots], alive)


SMALL = [512, 1024, 4096, 20000, 100_000, 700_000]
LARGE = [3 * MIB, 8 * MIB, 25 * MIB, 64 * MIB, 130 * MIB]


@cache
def programs(pairs: int) -> dict[str, list[Any]]:
    """Return name: [columns of each thread, first stream of each thread]."""
    one: dict[str, Columns] = {
        f"{name}, 1 alive": cycling([size], 1, pairs)
        for name, size in (
            ("512 B", 512),
            ("64 KiB", 64 << 10),
            ("1 MiB", MIB),
            ("20 MiB", 20 * MIB),
            ("512 MiB", 512 * MIB),
        )
    }
    one["small sizes, 64 alive"] = cycling(SMALL, 64, pairs)
    one["large sizes, 16 alive"] = cycling(LARGE, 16, pairs // 4)
    one["random to 1 MiB, 1000 alive"] = random_lifetimes(512, MIB, 1000, pairs)
    one["random to 64 MiB, 500 alive"] = random_lifetimes(512, 64 * MIB, 500, pairs)
    found = {name: [[columns], [0]] for name, columns in one.items()}
    for threads in (4, 16):
        each = [cycling(SMALL, 64, pairs, k) for k in range(threads)]
        found[f"small, {threads} threads, own streams"] = [each, list(range(1, threads + 1))]
    each = [cycling(SMALL, 64, pairs, k) for k in range(4)]
    found["small, 4 threads, one stream"] = [each, [1] * 4]
    return found


def load(path: str) -> tuple[Columns, int]:
    """Return a recorded run and the most bytes that are live in it."""
    from gpumemx import load_trace

    trace = load_trace(path)
    # A free's own size is not looked at: it is that of the slot's allocation.
    size = trace.size.copy()
    held: dict[int, int] = {}
    for i, op in enumerate(trace.op.tolist()):
        if op >= 0:
            held[op] = int(size[i])
        else:
            size[i] = held.pop(~op)
    live = int(np.cumsum(np.where(trace.op >= 0, size, -size)).max())
    return (trace.op, size, trace.stream, trace.slots), live


# --- work of the workers


def work(job: Job) -> Result:
    return {"pairs": pairs, "trace": trace, "checked": checked}[job["kind"]](job)


FOREIGN = "small sizes, freed by another thread"


def pairs(job: Job) -> Result:
    """Return nanoseconds a pair: of each program the median pass and thread, from the third pass.

    Each begins on an empty cache. A program that fails has its error in the place of a number.
    Driver time is the mean of these passes, all threads together.
    """
    import torch

    found: dict[str, tuple[float, float] | str] = {}
    for name in [*programs(job["pairs"]), FOREIGN]:
        found[name] = nanoseconds(name, job)
        if not job["nothing"]:
            torch.cuda.empty_cache()
    return {"ns": found}


def nanoseconds(name: str, job: Job) -> tuple[float, float] | str:
    import allocator_probe as probe

    def waited() -> float:
        return 1e9 * driver_figures().get("seconds_inline", 0.0)

    if name == FOREIGN:
        run = probe.foreign_frees_of_nothing if job["nothing"] else probe.foreign_frees
        try:
            run(SMALL, job["pairs"], 64)
            before = waited()
            times = [run(SMALL, job["pairs"], 64) for _ in range(job["passes"])]
        except RuntimeError as error:
            return first_line(str(error))
        return median(times), (waited() - before) / (job["passes"] * job["pairs"])
    threads = threads_of(name, job["pairs"])
    run = probe.run_nothing if job["nothing"] else probe.run
    results = run(threads, 2)
    before = waited()
    results += run(threads, job["passes"])
    driver = waited() - before
    if failed := [p.error for passes in results for p in passes if p.error]:
        return first_line(failed[0])
    count = len(programs(job["pairs"])[name][0][0][0]) / 2
    timed = [p.ns for passes in results[len(threads) :] for p in passes]
    return median(timed) / count, driver / (count * len(timed))


def threads_of(name: str, pairs: int) -> list[Any]:
    """Return a program for each thread."""
    import allocator_probe as probe

    each, first = programs(pairs)[name]
    return [
        probe.Program(*columns, first_stream=stream)
        for columns, stream in zip(each, first, strict=True)
    ]


def first_line(error: str) -> str:
    return error.partition("\n")[0][:200]


def reserved_peak() -> int:
    import torch

    return int(torch.cuda.memory_stats().get("reserved_bytes.all.peak", 0))


def trace(job: Job) -> Result:
    """Replay one trace: cold, warm, and under the smallest cap that fits."""
    import allocator_probe as probe

    columns, live = load(job["path"])
    program = probe.Program(*columns)
    events = len(columns[0])
    if job["nothing"]:
        passes = probe.run_nothing([program], job["passes"] + 1)[0]
        ns = [p.ns / events for p in passes]
        return {"live": live, "events": events, "cold": ns[0], "warm": median(ns[1:])}

    cold, driver = replay(program, 1)
    peak = reserved_peak()
    if cold[0].error:
        return {"failed": first_line(cold[0].error)}
    warm, warm_driver = replay(program, job["passes"])
    result: Result = {
        "live": live,
        "events": events,
        "reserved": peak,
        "cold": cold[0].ns / events,
        "warm": median(p.ns for p in warm) / events,
        "driver": driver,
        "warm driver": {key: value / len(warm) for key, value in warm_driver.items()},
    }
    if job["fit"]:
        result["fit"] = fit(program, live, peak)
        tight = [under_cap(program, result["fit"]) for _ in range(job["passes"])]
        passed = [p for p in tight if not p[0].error]
        result["tight fails"] = len(tight) - len(passed)
        result["tight"] = median(p.ns / events for p, _ in passed)
        result["tight driver"] = {
            key: median(driver[key] for _, driver in passed) for key in tight[0][1]
        }
    return result


def replay(program: Any, passes: int) -> tuple[list[Any], dict[str, float]]:
    """Run a program `passes` times; return the passes and gpumemx's driver seconds in them."""
    import allocator_probe as probe

    before = driver_figures()
    results = probe.run([program], passes)[0]
    after = driver_figures()
    keys = ("seconds", "seconds_inline", "seconds_growth") if after else ()
    return results, {key: after[key] - before.get(key, 0.0) for key in keys}


def under_cap(program: Any, cap: int) -> tuple[Any, dict[str, float]]:
    """Run a program once on an empty cache under a cap."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    set_cap(cap)
    passes, driver = replay(program, 1)
    set_cap(None)
    return passes[0], driver


def fit(program: Any, live: int, peak: int) -> int:
    """Return the smallest cap that the program passes under, to 0.4 % of live."""
    low, high = live, max(peak, int(live * 1.004))
    while high - low > 0.004 * live:
        middle = (low + high) // 2
        passed, _ = under_cap(program, middle)
        low, high = (middle, high) if passed.error else (low, middle)
    return high


def checked(job: Job) -> Result:
    """Run with contents, then look at the device at random moments of a run without."""
    import allocator_probe as probe
    import torch

    if job["path"]:
        columns, _ = load(job["path"])
        threads, events = [probe.Program(*columns)], len(columns[0])
    else:
        threads = threads_of(job["name"], job["pairs"])
        events = len(programs(job["pairs"])[job["name"]][0][0][0])
    contents = probe.run_checked(threads, True, [])
    if contents.error:
        return {"failed": first_line(contents.error)}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = probe.look()
    moments = sorted(random.Random(2).sample(range(events), 100))
    # While other threads change memory, the two numbers cannot be read as of one moment.
    looked = probe.run_checked(threads[:1], False, moments)
    if looked.error:
        return {"failed": first_line(looked.error)}
    others = before.gone - before.reserved
    off = [m.gone - m.reserved - others for m in looked.moments]
    return {
        "words": contents.words,
        "wrong": contents.wrong,
        "off": max(off, key=abs),
        "reserved": max(m.reserved for m in looked.moments),
    }


# --- tables


def print_pairs(workers: dict[str, Worker], args: argparse.Namespace) -> None:
    times: dict[str, dict[str, list[tuple[float, float]]]] = {
        who: defaultdict(list) for who in workers
    }
    count = 2000 if args.tiny else args.pairs
    for _ in range(args.runs):
        for who, worker in workers.items():
            job = {"kind": "pairs", "pairs": count, "passes": args.passes}
            result = worker.run(**job, nothing=who == ALONE, tiny=args.tiny)
            if failed := result.get("failed"):
                print(f"{who}: {failed}", flush=True)
            for name, ns in result.get("ns", {}).items():
                if isinstance(ns, str):
                    print(f"{who}, {name}: {ns}", flush=True)
                else:
                    times[who][name].append(ns)
    print("\nns a pair of allocate and free, median of runs, passes and threads")

    def cell(who: str, name: str) -> str:
        each = times[who][name]
        text = show(median(ns for ns, _ in each), ",.0f")
        driver = median(waited for _, waited in each)
        return f"{text} ({driver:,.0f})" if driver > 0 else text

    rows = [[name, *(cell(who, name) for who in workers)] for name in [*programs(count), FOREIGN]]
    table(["", *workers], rows)


def ask(worker: Worker, runs: int, **job: Any) -> Result:
    """Return the run whose warm time is the median one, or the first that failed."""
    results = [worker.run(**job) for _ in range(runs)]
    failed = [r for r in results if r.get("failed")]
    return failed[0] if failed else sorted(results, key=lambda r: r["warm"])[len(results) // 2]


def print_traces(workers: dict[str, Worker], args: argparse.Namespace) -> None:
    rows = []
    for path in args.traces:
        for who, worker in workers.items():
            result = ask(
                worker,
                args.runs,
                kind="trace",
                path=str(path),
                passes=args.passes,
                fit=not args.no_fit,
                nothing=who == ALONE,
                tiny=args.tiny,
            )
            if result.get("failed"):
                print(f"{who}, {path.stem}: {result['failed']}")
            else:
                rows.append(trace_row(path.stem, who, result))
    print(
        "\nTraces. cold, warm, tight: ns an event, in () without the driver calls that the program "
        "waits for; growth: ms a GiB reserved; inline: ms of driver calls waited for, growth apart"
    )
    head = ["trace", "allocator", "live GiB", "reserved", "fits in", "cold", "warm", "tight"]
    table([*head, "growth", "inline cold", "warm", "tight"], rows)


def trace_row(name: str, who: str, r: Result) -> list[str]:
    def time(key: str, driver: str) -> str:
        text = show(r.get(key), ",.0f")
        if seconds := r.get(driver):
            text += f" ({r[key] - 1e9 * seconds['seconds_inline'] / r['events']:,.0f})"
        return text + (f" {r['tight fails']} failed" if key == "tight" and r["tight fails"] else "")

    def waited(driver: str) -> str:
        seconds = r.get(driver)
        if not seconds:
            return "-"
        return f"{1e3 * (seconds['seconds_inline'] - seconds['seconds_growth']):.1f}"

    def ratio(key: str) -> str:
        return show(r[key] / r["live"] if r.get(key) else None, ".4f")

    growth = (r.get("driver") or {}).get("seconds_growth")
    return [
        name,
        who,
        f"{r['live'] / GIB:.3f}",
        ratio("reserved"),
        ratio("fit"),
        time("cold", "driver"),
        time("warm", "warm driver"),
        time("tight", "tight driver") if "tight" in r else "-",
        show(1e3 * growth / (r["reserved"] / GIB) if growth is not None else None, ".2f"),
        waited("driver"),
        waited("warm driver"),
        waited("tight driver"),
    ]


def print_checked(workers: dict[str, Worker], args: argparse.Namespace) -> None:
    names = [name for name in programs(args.pairs) if " 1 alive" not in name]
    rows = []
    for name, path in [*((n, "") for n in names), *((p.stem, str(p)) for p in args.traces)]:
        for who, worker in workers.items():
            if who == ALONE:
                continue
            r = worker.run(kind="checked", name=name, path=path, pairs=args.pairs, tiny=args.tiny)
            if r.get("failed"):
                print(f"{who}, {name}: {r['failed']}")
                continue
            words = f"{r['words'] / 1e6:,.0f}"
            off = f"{r['off'] / MIB:.2f}"
            rows.append([name, who, words, str(r["wrong"]), off, f"{r['reserved'] / MIB:,.0f}"])
    print("\nContents, and the driver's word at 100 moments: MiB gone beyond reserved at the worst")
    table(["", "allocator", "million words", "wrong", "off MiB", "of MiB"], rows)


SECTIONS: dict[str, Callable[[dict[str, Worker], argparse.Namespace], None]] = {
    "pairs": print_pairs,
    "traces": print_traces,
    "checked": print_checked,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, runs=1)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--traces", type=Path, nargs="+", default=sorted(TRACES.glob("*.npz")), metavar="FILE"
    )
    parser.add_argument("--pairs", type=int, default=20000, help="a pass; default: 20000")
    parser.add_argument("--passes", type=int, default=5, help="timed ones a run; default: 5")
    parser.add_argument("--no-fit", action="store_true", help="leave out the smallest cap")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, work)
        return
    # A worker of any kind can run the loop without an allocator.
    names = [ALONE, *([] if args.tiny else args.allocators)]
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(name if name in ALLOCATORS else "native"))
            for name in names
        }
        for section in args.sections:
            SECTIONS[section](workers, args)


if __name__ == "__main__":
    main()
