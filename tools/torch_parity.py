#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The parity run: torch's own tests on gpumemx and on torch's allocator, and the difference.

python tools/torch_parity.py TESTS [--devices 0,1 | --cards] [--out FOLDER] [FILE ...]

TESTS is test/ of a torch source tree. It need not be of the torch that is installed: for torch 2.11
the tests of torch 2.6 were used, from Debian trixie's source package pytorch 2.6.0. They import the
packages expecttest and psutil; pytest-xdist and pytest-timeout are used when they are there.

Each side is a pytest run over a copy of TESTS. The sides differ in one environment variable, which
makes every process install gpumemx as it starts. A test is lost when it passes on torch's allocator
(here "native") and not on gpumemx, neither in that run nor in three tries alone in a process of its
own: what a test leaves behind can make others fail after it, on either allocator, and which test
comes after which is chance. A test that then fails alone on native too, once in three tries, is
unsteady: named, and not lost.

--cards: what needs two devices, which each side then has: torch's tests of several devices in one
process, and those of collectives over NCCL.

Exit status 1 when a test is lost that is not in NATIVE_ONLY, or when there was nothing to compare:
no test passed on native, or on the one side of --only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Tests that can only pass on torch's own allocator, with the reason. Twelve at most: what does not
# fit is a loss.
NATIVE_ONLY = {
    "test_cuda.TestCuda::test_graph_memory_stats_and_use_result_after_destroy_graph": (
        "counts torch's own segments of 2 and 20 MiB"
    ),
}
MAX_NATIVE_ONLY = 12

SIDES = ("gpumemx", "native")
FILES = (
    "test_cuda.py",
    "test_cuda_trace.py",
    "test_cuda_sanitizer.py",
    "test_cuda_primary_ctx.py",
    "test_multiprocessing.py",
    "inductor/test_cudagraph_trees.py",
    "profiler/test_memory_profiler.py",
)
# The rest of those files is about optimizers, matrix products and tensors without memory.
SELECTION = "not TestFakeTensor and not Optim and not gemm"
CARD_FILES = (
    "test_cuda_multigpu.py",
    "distributed/test_nccl.py",
    "distributed/test_c10d_nccl.py",
    "distributed/test_c10d_spawn_nccl.py",
)
# Of the last two what is about collectives, sending to the other rank, and contexts: the rest is
# about errors, time-outs and traces. Without what is for the switch's multicast alone.
CARD_SELECTION = (
    "(MultiGPU or TestNCCL or CommTest or DispatchedCollectives or DistributedNNFunctions or"
    " subgroup_p2p or extra_cuda_context or comm_hook_allreduce_hook_nccl or grad_layout_1device)"
    " and not LargeCommTest and not UserBuffer and not intra_node"
)
INSTALL = "import gpumemx; gpumemx.install_allocator()"
NOT_RUN = "not run"
COLLECTION = "::(collection)"  # in the place of a test: the import of its file
GRACE_S = 15.0
TRIES = 3  # alone

# `gpumemx run`, for every process: Python runs a sitecustomize.py on its path before anything else,
# also in xdist's workers and in the programs that the tests start.
SITECUSTOMIZE = """\
import os

if statement := os.environ.get("TORCH_PARITY_INSTALL"):
    try:
        exec(statement, {})
    except BaseException:
        # Python itself would only print a line and go on, on torch's own allocator.
        import traceback

        traceback.print_exc()
        os._exit(70)
"""

# Writes what happens as it happens, a JSON line each: pytest's own files are written at the end,
# which a run that is stopped never sees. With xdist the process that collects the reports writes.
PLUGIN = """\
import json
import os

import pytest


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


class Recorder:
    def __init__(self):
        self.file = open(os.environ["TORCH_PARITY_REPORTS"], "w", buffering=1)

    def write(self, **record):
        print(json.dumps(record), file=self.file)

    def write_report(self, report):
        record = {"test": report.nodeid, "outcome": report.outcome}
        record["seconds"] = getattr(report, "duration", 0)
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.strip()]
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines() if crash else []
            error = (message[:1] or lines[-1:] or ["failed"])[0]
            record["error"] = error.removeprefix("E  ").strip()
            record["tail"] = lines[-15:]
        self.write(**record)

    def pytest_collection_finish(self, session):
        self.write(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.write(collected=list(ids))

    def pytest_collectreport(self, report):
        if report.failed:
            self.write_report(report)

    def pytest_runtest_logstart(self, nodeid):
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report):
        self.write_report(report)

    def pytest_runtest_logfinish(self, nodeid):
        self.write(finished=nodeid)
"""


@dataclass
class Results:
    """What came of each test of a side. A file that cannot be imported counts as a failed test."""

    outcomes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # of failed tests, one line each
    tails: dict[str, list[str]] = field(default_factory=dict)  # of failed tests, the last lines
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)  # what pytest calls each test


@dataclass
class Run:
    """One side while it runs."""

    side: str
    process: subprocess.Popen[bytes]
    log: Path
    reports: Path
    started: float
    stopped: float | None = None  # when it was interrupted, for reaching the limit
    seconds: float | None = None  # how long it took; None while it runs


# --- running


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", type=Path, help="test/ of a torch source tree")
    parser.add_argument("files", nargs="*", metavar="FILE", help="in TESTS; default: the usual")
    parser.add_argument("--cards", action="store_true", help="the tests that need two devices")
    parser.add_argument("--workers", type=int, default=8, help="processes of a side (8)")
    parser.add_argument("--timeout", type=int, default=100, help="seconds for a test (100)")
    parser.add_argument("--limit", type=float, default=560, help="seconds for a side (560)")
    parser.add_argument(
        "--again", type=float, default=200, help="seconds a side for the lost, each alone (200)"
    )
    parser.add_argument("--devices", default="", help="CUDA_VISIBLE_DEVICES; A,B: both at once")
    parser.add_argument("--only", choices=SIDES, help="run one side")
    parser.add_argument("--native", type=Path, help="recorded outcomes instead of a native run")
    parser.add_argument("--out", type=Path, help="folder for <side>.xml, .log, .json and .jsonl")
    parser.add_argument("-k", dest="selection", help="default: what is about memory, or as --cards")
    parser.add_argument("--install", default=INSTALL, help=f"default: {INSTALL}")
    parser.add_argument("--verbose", action="store_true", help="name what passes only on gpumemx")
    return parser


def chosen_files(tests: Path, named: list[str], usual: tuple[str, ...] = FILES) -> list[str]:
    """Return what is asked for, or what there is of the usual files."""
    files = named or list(usual)
    missing = [name for name in files if not (tests / name).is_file()]
    if missing and (named or len(missing) == len(files)):
        sys.exit(f"torch_parity: not in {tests}: {', '.join(missing)}")
    if missing:
        print(f"not in {tests}, left out: {', '.join(missing)}")
    return [name for name in files if name not in missing]


def prepare(tests: Path, target: Path) -> None:
    """Copy the tests, with what installs gpumemx and what writes the outcomes down."""
    shutil.copytree(tests, target, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    (target / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (target / "torch_parity_reports.py").write_text(PLUGIN)
    trees = target / "inductor" / "test_cudagraph_trees.py"
    if trees.is_file():
        # The old name is gone from torch.testing's inductor_utils; these tests need both anyway.
        text = trees.read_text()
        trees.write_text(re.sub(r"\bHAS_CUDA\b", "HAS_CUDA_AND_TRITON", text))


def command(args: argparse.Namespace, tests: list[str]) -> list[str]:
    words = [sys.executable, "-m", "pytest", "-q", "--rootdir=.", "-p", "no:cacheprovider"]
    words += ["-p", "torch_parity_reports", "--continue-on-collection-errors"]
    if find_spec("pytest_timeout"):
        words += ["--timeout", str(args.timeout)]
    if find_spec("pytest_benchmark"):
        words += ["-p", "no:benchmark"]  # it warns under xdist
    return words + tests


def command_of_all(args: argparse.Namespace, files: list[str], xml: Path) -> list[str]:
    words = ["-o", "junit_family=xunit1", f"--junitxml={xml}", "-k", args.selection]
    if find_spec("xdist"):
        # A worker that crashed is replaced, however often: each crash is the result of one test.
        words += ["-n", str(args.workers), "--max-worker-restart=10000"]
    return command(args, words + files)


def environment(args: argparse.Namespace, side: str, tests: Path, device: str) -> dict[str, str]:
    path = [str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(path), PYTHONUNBUFFERED="1")
    env |= {"HF_HUB_OFFLINE": "1", "CI": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    env.pop("GPUMEMX_DISABLE", None)  # with it both sides were native
    env.pop("TORCH_PARITY_INSTALL", None)
    if side == "gpumemx":
        env["TORCH_PARITY_INSTALL"] = args.install
    if device:
        env["CUDA_VISIBLE_DEVICES"] = device
    return env


def start(
    args: argparse.Namespace, side: str, files: list[str], temp: Path, out: Path, device: str
) -> Run:
    tests = temp / side
    prepare(args.tests, tests)
    env = environment(args, side, tests, device)
    reports = out / f"{side}.jsonl"
    reports.unlink(missing_ok=True)
    env["TORCH_PARITY_REPORTS"] = str(reports)
    log = out / f"{side}.log"
    with log.open("wb") as file:
        # A group of its own, so that all that the tests started can be ended with it.
        process = subprocess.Popen(
            command_of_all(args, files, out / f"{side}.xml"),
            cwd=tests,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    print(f"{side}: started{f' on device {device}' if device else ''}", flush=True)
    return Run(side, process, log, reports, time.monotonic())


def end(run: Run) -> None:
    """Take the time, and kill what is left of a side with all that its tests started."""
    run.seconds = time.monotonic() - run.started
    with suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()


def is_done(run: Run, limit: float) -> bool:
    """Tell whether a side has ended; interrupt it at the limit, and kill it a little later."""
    now = time.monotonic()
    if run.process.poll() is None:
        if run.stopped is None and now - run.started > limit:
            run.stopped = now
            run.process.send_signal(signal.SIGINT)
        if run.stopped is None or now - run.stopped < GRACE_S:
            return False
    return True


def wait_for(runs: list[Run], limit: float) -> None:
    while waiting := [run for run in runs if run.seconds is None]:
        for run in waiting:
            if is_done(run, limit):
                end(run)
        time.sleep(0.1)


def run_sides(
    args: argparse.Namespace, sides: list[str], files: list[str], temp: Path, out: Path
) -> dict[str, Results]:
    devices = args.devices.split(",")
    at_once = len(devices) > 1 and len(sides) > 1
    results = {}
    for group in [sides] if at_once else [[side] for side in sides]:
        runs: list[Run] = []
        try:
            for side, device in zip(group, devices, strict=False):
                runs.append(start(args, side, files, temp, out, device))
            wait_for(runs, args.limit)
        finally:
            for run in runs:
                if run.seconds is None:
                    end(run)
        for run in runs:
            results[run.side] = finish(run)
            write(results[run.side], out / f"{run.side}.json")
    return results


def write(results: Results, path: Path) -> None:
    path.write_text(json.dumps(asdict(results), indent=0) + "\n")


def finish(run: Run) -> Results:
    """Read what a side wrote, and say how it ended."""
    results = read_reports(run.reports, interrupted=run.stopped is not None)
    print(f"{run.side}: {counted(results.outcomes.values())} in {run.seconds:.0f} s", flush=True)
    for key in results.errors:
        if key.endswith(COLLECTION):
            print(f"{run.side}: {key.removesuffix(COLLECTION)} not imported: {results.errors[key]}")
    if run.stopped is not None:
        print(f"{run.side}: stopped at the limit")
    elif run.process.returncode not in (0, 1) or not results.outcomes:
        print(f"{run.side}: pytest ended with {run.process.returncode}; its last lines:")
        for line in run.log.read_text(errors="replace").splitlines()[-15:]:
            print(f"  {line}")
    return results


def run_alone(
    args: argparse.Namespace, side: str, tests: Path, node: str, reports: Path, until: float
) -> Results:
    """Run one test in a process of its own; until when by time.monotonic()."""
    env = environment(args, side, tests, args.devices.split(",")[0])
    left = until - time.monotonic()
    reports.unlink(missing_ok=True)
    if left > 0:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command(args, [node]),
                cwd=tests,
                env=env | {"TORCH_PARITY_REPORTS": str(reports)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=left,
                check=False,
            )
    return read_reports(reports, interrupted=time.monotonic() > until)


def try_again(args: argparse.Namespace, temp: Path, results: Results, lost: set[str]) -> set[str]:
    """Try each test that gpumemx's side has lost alone, and note which pass.

    Return those that do not, and fail alone on torch's allocator as well.
    """
    tests = temp / "gpumemx"
    known = sorted(key for key in lost if key in results.nodes)

    def ends_as(key: str, side: str, wanted: str, until: float) -> Results | None:
        """Return the first of the tries that ends as wanted."""
        reports = temp / f"again-{side}-{known.index(key)}.jsonl"
        for _ in range(TRIES):
            found = run_alone(args, side, tests, results.nodes[key], reports, until)
            if found.outcomes.get(key) == wanted:
                return found
            last[key] = found
        return None

    last: dict[str, Results] = {}
    with ThreadPoolExecutor(args.workers) as pool:
        until = time.monotonic() + args.again
        second = pool.map(lambda key: ends_as(key, "gpumemx", "passed", until), known)
        passed = {key for key, found in zip(known, second, strict=True) if found}
        for key in known:
            if key in passed:
                results.outcomes[key] = "passed"
            elif key in last[key].errors:
                results.errors[key] = last[key].errors[key]
                results.tails[key] = last[key].tails.get(key, [])
        still = [key for key in known if key not in passed]
        # Whatever the second tries have taken, those on native get as long.
        later = time.monotonic() + args.again
        third = pool.map(lambda key: ends_as(key, "native", "failed", later), still)
        unsteady = {key for key, found in zip(still, third, strict=True) if found}
    print(f"gpumemx: {len(known)} tests again, each alone: {len(passed)} passed", flush=True)
    return unsteady


# --- outcomes


def key_of(node: str) -> str:
    """Return what pytest's JUnit files call a test, as classname::name."""
    path, bracket, parameters = node.partition("[")
    names = path.split("::")
    names[0] = names[0].replace("/", ".").removesuffix(".py")
    if len(names) == 1:
        return names[0] + COLLECTION
    return ".".join(names[:-1]) + "::" + names[-1] + bracket + parameters


def records(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.is_file() else []:
        with suppress(ValueError):  # the last line of a process that was killed
            yield json.loads(line)


def read_reports(path: Path, *, interrupted: bool) -> Results:
    """Return the outcomes: failed if a phase failed, else skipped if one was, else passed."""
    results = Results()
    running: set[str] = set()
    for record in records(path):
        for node in record.get("collected", []):
            results.outcomes.setdefault(key_of(node), NOT_RUN)
            results.nodes[key_of(node)] = node
        if "started" in record:
            running.add(key_of(record["started"]))
        elif "finished" in record:
            running.discard(key_of(record["finished"]))
        elif "test" in record:
            add_report(results, record)
    for key in running:
        if results.outcomes.get(key) == "failed":
            continue  # xdist's word for a crash: a report and no end
        results.outcomes[key] = NOT_RUN if interrupted else "failed"
        results.errors[key] = "ran when " + ("the limit came" if interrupted else "pytest ended")
    return results


def add_report(results: Results, record: dict[str, Any]) -> None:
    key, outcome = key_of(record["test"]), record["outcome"]
    order = (NOT_RUN, "passed", "skipped", "failed")
    before = results.outcomes.get(key, NOT_RUN)
    results.outcomes[key] = max(before, outcome, key=order.index)
    results.seconds[key] = results.seconds.get(key, 0) + record["seconds"]
    if outcome == "failed" and before != "failed":
        results.errors[key] = record["error"]
        results.tails[key] = record["tail"]


def recorded_native(
    path: Path, gpumemx: dict[str, str], files: list[str], *, narrowed: bool
) -> dict[str, str]:
    """Return recorded outcomes of the files, and if narrowed, of what gpumemx's side collected."""
    modules = tuple(name.replace("/", ".").removesuffix(".py") for name in files)
    outcomes: dict[str, str] = json.loads(path.read_text())["outcomes"]
    return {
        key: outcome
        for key, outcome in outcomes.items()
        if key.startswith(tuple(f"{module}{end}" for module in modules for end in (".", "::")))
        and (key in gpumemx or not narrowed)
    }


# --- the report


def counted(outcomes: Iterable[str]) -> str:
    counts = Counter(outcomes)
    return ", ".join(f"{counts[o]} {o}" for o in ("passed", "failed", "skipped", NOT_RUN))


def print_table(headings: tuple[str, str], rows: dict[str, tuple[int, int]]) -> None:
    first, second = headings
    width = max(24, *map(len, rows)) if rows else 24
    print(f"{'':<{width}}{first:>10}{second:>10}")
    for name, (left, right) in sorted(rows.items()):
        print(f"{name:<{width}}{left:>10}{right:>10}")
    totals = [sum(row[i] for row in rows.values()) for i in range(2)]
    print(f"{'all':<{width}}{totals[0]:>10}{totals[1]:>10}")


def print_failed(title: str, tests: Iterable[str], results: Results) -> None:
    for key in sorted(tests):
        outcome = results.outcomes.get(key, "not collected")
        error = results.errors.get(key)
        print(f"{title} {key}: {outcome}{f': {error}' if error else ''}")


def report_one(results: Results) -> int:
    """Print what one side did, without another to compare with, and return the exit status."""
    rows: dict[str, tuple[int, int]] = {}
    for key, outcome in results.outcomes.items():
        passed, failed = rows.get(key.split("::")[0], (0, 0))
        passed, failed = passed + (outcome == "passed"), failed + (outcome == "failed")
        rows[key.split("::")[0]] = passed, failed
    print_table(("passed", "failed"), rows)
    print_failed("failed", (k for k, o in results.outcomes.items() if o == "failed"), results)
    print(counted(results.outcomes.values()))
    return int("passed" not in results.outcomes.values())


def lost_of(native: dict[str, str], gpumemx: Results) -> set[str]:
    return {
        key
        for key, outcome in native.items()
        if outcome == "passed" and gpumemx.outcomes.get(key) != "passed" and key not in NATIVE_ONLY
    }


def report(
    native: dict[str, str],
    gpumemx: Results,
    unsteady: Iterable[str] = (),
    *,
    verbose: bool = False,
) -> int:
    """Print the difference, and return the exit status."""
    passed = {key for key, outcome in gpumemx.outcomes.items() if outcome == "passed"}
    wanted = {key for key, outcome in native.items() if outcome == "passed"}
    rows: dict[str, tuple[int, int]] = {}
    for key in wanted:
        name = key.split("::")[0]
        left, right = rows.get(name, (0, 0))
        rows[name] = left + 1, right + (key in passed)
    print_table(("native", "gpumemx"), rows)

    lost = lost_of(native, gpumemx) - set(unsteady)
    print_failed("lost", lost, gpumemx)
    print_failed("unsteady, fails alone on native too:", unsteady, gpumemx)
    for key in sorted(wanted & set(NATIVE_ONLY)):
        now = "; it passes now, strike it" if key in passed else ""
        print(f"native only {key}: {NATIVE_ONLY[key]}{now}")
    gained = passed - wanted
    print(f"{len(gained)} pass only under gpumemx")
    for key in sorted(gained) if verbose else []:
        print(f"gained {key}: under native {native.get(key, 'not collected')}")
    if not wanted:
        print("nothing to compare: no test passed under native")
    print(f"{len(wanted & passed)} of {len(wanted)} that pass under native pass under gpumemx")
    return int(bool(lost) or not wanted)


def sides_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    if args.native and args.only == "native":
        parser.error("--native stands for a native run: it does not go with --only native")
    if args.cards and args.devices:
        parser.error("--cards takes all devices: it does not go with --devices")
    if args.devices.count(",") > 1:
        parser.error("--devices takes one device or two")
    if args.native:
        return ["gpumemx"]
    return [args.only] if args.only else list(SIDES)


def main() -> int:
    parser = arguments()
    args = parser.parse_intermixed_args()
    sides = sides_of(args, parser)
    usual = CARD_SELECTION if args.cards else SELECTION
    is_narrowed = args.selection is not None and args.selection != usual
    args.selection = args.selection or usual
    if len(NATIVE_ONLY) > MAX_NATIVE_ONLY:
        sys.exit(f"torch_parity: NATIVE_ONLY has {len(NATIVE_ONLY)} tests, {MAX_NATIVE_ONLY} go")
    files = chosen_files(args.tests, args.files, CARD_FILES if args.cards else FILES)
    for module, option in (("xdist", "--workers"), ("pytest_timeout", "--timeout")):
        if not find_spec(module):
            print(f"{module} is not installed: {option} has no effect")
    # What runs is ended also when somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    with tempfile.TemporaryDirectory(prefix="torch-parity-", ignore_cleanup_errors=True) as folder:
        temp = Path(folder)
        out = args.out.resolve() if args.out else temp / "out"
        out.mkdir(parents=True, exist_ok=True)
        results = run_sides(args, sides, files, temp, out)
        if args.native:
            outcomes = results["gpumemx"].outcomes
            native = recorded_native(args.native, outcomes, files, narrowed=is_narrowed)
        elif len(sides) == 2:
            native = results["native"].outcomes
        else:
            print()
            return report_one(results[sides[0]])
        lost, unsteady = lost_of(native, results["gpumemx"]), set[str]()
        if lost and args.again > 0:
            unsteady = try_again(args, temp, results["gpumemx"], lost)
            write(results["gpumemx"], out / "gpumemx.json")

    print()
    return report(native, results["gpumemx"], unsteady, verbose=args.verbose)


if __name__ == "__main__":
    sys.exit(main())
