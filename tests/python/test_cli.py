# SPDX-License-Identifier: BSD-3-Clause
"""The command line: tables, JSON, exit status, and one line for each bad file."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from bad_files import BAD_FILES
from conftest import TRACES, arrays, gpumemx

KEYS = [
    "file",
    "policy",
    "events",
    "live_peak_bytes",
    "reserved_peak_bytes",
    "fits_in_bytes",
    "driver_calls",
    "driver_seconds",
    "driver_seconds_inline",
    "driver_seconds_growth",
    "trace_seconds",
    "host_ns_per_event",
    "failed_at",
]


def results(text: str) -> list[dict[str, object]]:
    document = json.loads(text)
    assert list(document) == ["results"]
    return document["results"]


def test_the_tables_fit_and_show_every_file() -> None:
    done = gpumemx("replay", *TRACES)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    for trace in TRACES:
        rows = [line for line in lines if line.startswith(trace.name)]
        assert len(rows) == 2
    for header in ("events", "peak live", "peak reserved", "ratio", "failed at"):
        assert header in done.stdout
    for header in ("create", "map", "access", "unmap", "release", "inline", "growth", "host"):
        assert header in done.stdout
    assert "fits in" not in done.stdout


def test_files_of_one_name_are_told_apart(good: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / good.name
    other.write_bytes(good.read_bytes())
    done = gpumemx("replay", "good.npz", "b/good.npz", cwd=tmp_path)
    assert "\nb/good.npz" in done.stdout


def test_a_name_is_not_read_as_markup(good: Path, tmp_path: Path) -> None:
    odd = tmp_path / "[red]odd[bold].npz"
    good.rename(odd)
    done = gpumemx("replay", odd)
    assert done.returncode == 0
    assert "[red]odd[bold].npz" in done.stdout


def test_the_json_has_the_documented_form(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = gpumemx("replay", good, *TRACES[:1], "--json", file)
    assert done.returncode == 0
    found = results(file.read_text())
    assert [list(result) for result in found] == [KEYS, KEYS]
    assert [result["file"] for result in found] == [str(good), str(TRACES[0])]
    first = found[0]
    assert first["policy"] == "gpumemx"
    assert first["events"] == 4
    assert first["live_peak_bytes"] == 96 << 20
    assert first["fits_in_bytes"] is None
    assert first["failed_at"] is None
    assert first["trace_seconds"] == 0.002
    calls = first["driver_calls"]
    assert isinstance(calls, dict)
    assert list(calls) == ["create", "map", "set_access", "unmap", "release"]
    assert all(isinstance(count, int) for count in calls.values())
    for key in KEYS[7:12]:
        assert isinstance(first[key], float)


def test_the_json_goes_to_stdout_alone(good: Path) -> None:
    done = gpumemx("replay", good, "--json", "-", "--fit")
    assert done.returncode == 0
    assert results(done.stdout)[0]["fits_in_bytes"] == 96 << 20


def test_the_fit_is_in_the_table(good: Path) -> None:
    done = gpumemx("replay", good, "--fit")
    assert "fits in" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("good.npz"))
    assert row.split() == ["good.npz", "4", "0.094", "0.094", "1.0000", "0.094", "-"]


def test_the_json_replaces_a_file_whole(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("old" * 10_000)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert gpumemx("replay", good, "--json", link, umask=0o027).returncode == 0
    assert len(results(file.read_text())) == 1
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.npz", "link.json", "out.json"]


def test_the_json_may_go_to_a_device(good: Path) -> None:
    assert gpumemx("replay", good, "--json", "/dev/null").returncode == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_json_that_cannot_be_written_is_one_line(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "out.json"
    done = gpumemx("replay", good, "--json", file)
    assert done.returncode == 2
    assert done.stderr == f"gpumemx replay: {file}: No such file or directory\n"
    assert "good.npz" in done.stdout


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_does_not_keep_the_others_back(kind: str, good: Path, tmp_path: Path) -> None:
    make, text = BAD_FILES[kind]
    bad = tmp_path / f"{kind}.npz"
    make(bad)
    done = gpumemx("replay", bad, good, "--json", tmp_path / "out.json")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"gpumemx replay: {bad}: ")
    assert text in done.stderr
    assert [r["file"] for r in results((tmp_path / "out.json").read_text())] == [str(good)]
    assert "good.npz" in done.stdout


def test_bad_files_alone_print_no_table(tmp_path: Path) -> None:
    done = gpumemx("replay", tmp_path / "a.npz", tmp_path / "b\nc.npz", "--json", "-")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    assert results(done.stdout) == []


def test_running_out_of_memory_is_status_1(good: Path, tmp_path: Path) -> None:
    done = gpumemx("replay", good, "--capacity", "95MiB", "--json", tmp_path / "out.json")
    assert (done.returncode, done.stderr) == (1, "")
    assert "event 1" in done.stdout
    (result,) = results((tmp_path / "out.json").read_text())
    assert (result["failed_at"], result["events"]) == (1, 1)
    assert gpumemx("replay", good, "--capacity", "96MiB").returncode == 0
    assert gpumemx("replay", good, "nope.npz", "--capacity", "95MiB").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--capacity", "lots"], "argument --capacity: 'lots' is not a size"),
        (["--capacity", "0"], "argument --capacity: must be above 0"),
        (["--capacity", "9999999T"], "argument --capacity: '9999999T' is not a size"),
        (["--lag", "soon"], "argument --lag: 'soon' is not a number of milliseconds"),
        (["--lag", "-1"], "argument --lag: must be from 0 to 3600000 ms"),
        (["--lag", "nan"], "argument --lag: must be from 0 to 3600000 ms"),
        (["--policy", "nativ"], "there is no policy 'nativ'; the nearest name is 'native'"),
        (["--gpu", "RTX 4091"], "there is no card 'RTX 4091'; the nearest name is 'RTX 4090'"),
        (["--gpu", "T4,A100"], "'A100' does not say which card: there are A100-40GB and A100-80GB"),
        (["--setting", "price=3"], "'price=3' is not KEY:VALUE"),
        (["--setting", "prize:3"], "there is no setting 'prize'; the nearest name is 'price'"),
        (["--setting", "price:x"], "'x' is no value for price"),
        (
            ["--setting", "max_split_size_mb:64"],
            "'max_split_size_mb' is a setting of the policy native, not of gpumemx",
        ),
        (["--no-such"], "unrecognized arguments: --no-such"),
    ],
)
def test_a_bad_argument_is_status_2(good: Path, arguments: list[str], text: str) -> None:
    done = gpumemx("replay", good, *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_policies_are_rows_of_their_own(good: Path) -> None:
    done = gpumemx("replay", good, "--policy", "gpumemx, Native,expandable", "--fit")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("good.npz")]
    assert [row[1] for row in rows] == ["gpumemx", "native", "expandable", "gpumemx", "expandable"]
    assert rows[1][2:] == ["4", "0.094", "0.094", "1.0000", "0.094", "-"]
    # Pages of 20 MiB: 120 for 96, of which a limit is asked for only 40 + 64.
    assert rows[2][2:] == ["4", "0.094", "0.117", "1.2500", "0.102", "-"]
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_settings_go_to_the_policies_that_have_them(good: Path) -> None:
    words = ["--policy", "gpumemx,native", "--setting", "price:3", "--setting", "cap : 80MiB"]
    done = gpumemx("replay", good, *words, "--setting", "max_split_size_mb:64", "--json", "-")
    assert done.returncode == 1
    ours, native = results(done.stdout)
    assert ours["settings"] == {"price": "3", "cap": "80MiB"}
    assert native["settings"] == {"max_split_size_mb": "64"}
    assert (ours["failed_at"], native["failed_at"]) == (1, None)
    assert native["driver_calls"] == {"allocate": 2, "free": 0}


def test_cards_are_judged(good: Path, tmp_path: Path) -> None:
    done = gpumemx("replay", good, "--gpu", "t4,RTX 4090", "--gpu", "T4")
    assert done.returncode == 0
    rows = [line for line in done.stdout.splitlines() if " to spare" in line]
    assert [row.split()[1:5] for row in rows] == [
        ["T4", "14.56", "14.06", "fits,"],
        ["RTX", "4090", "23.52", "23.02"],
    ]
    big = arrays(size=np.array([8 << 30, 15 << 30, 1, 1], np.int64))
    np.savez(tmp_path / "big.npz", **big)
    done = gpumemx(
        "replay", tmp_path / "big.npz", "--policy", "native", "--gpu", "T4", "--json", "-"
    )
    assert done.returncode == 1
    (result,) = results(done.stdout)
    assert list(result) == [*KEYS, "gpus"]
    (card,) = result["gpus"]
    assert list(card) == ["name", "total_bytes", "usable_bytes", "fits", "failed_at", "spare_bytes"]
    assert (card["name"], card["fits"], card["failed_at"]) == ("T4", False, 1)
    assert card["spare_bytes"] == card["usable_bytes"] - (23 << 30)


def test_no_file_and_no_command_are_status_2() -> None:
    assert gpumemx("replay").returncode == 2
    assert gpumemx().returncode == 2


def test_the_lag_reaches_the_device(tmp_path: Path) -> None:
    # One stream frees, the other wants the memory 2 ms later: with a long lag it has to wait, which
    # is only possible where the capacity leaves no other way; it passes either way.
    path = tmp_path / "handover.npz"
    made = arrays(op=np.array([0, ~0, 1, ~1], np.int64), size=np.full(4, 64 << 20, np.int64))
    made["stream"] = np.array([0, 0, 1, 1], np.int16)
    np.savez(path, **made)
    reserved = {}
    for lag in ("0", "500"):
        done = gpumemx("replay", path, "--lag", lag, "--json", "-")
        reserved[lag] = results(done.stdout)[0]["reserved_peak_bytes"]
    assert reserved == {"0": 64 << 20, "500": 128 << 20}
    assert gpumemx("replay", path, "--lag", "500", "--capacity", "64MiB").returncode == 0


def test_the_command_says_its_version() -> None:
    import gpumemx as package

    assert gpumemx("--version").stdout == f"gpumemx {package.__version__}\n"


def test_an_interrupt_is_quiet(tmp_path: Path) -> None:
    # Long enough to be caught in the middle.
    n = 4_000_000
    op = np.zeros(n, np.int64)
    op[1::2] = ~0
    path = tmp_path / "long.npz"
    np.savez(
        path,
        op=op,
        size=np.ones(n, np.int64),
        stream=np.zeros(n, np.int16),
        time_us=np.arange(n, dtype=np.int64),
        slots=1,
    )
    # The line about the first file says that it is at work.
    command = [sys.executable, "-m", "gpumemx", "replay", "missing.npz", *[str(path)] * 50]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "missing.npz" in process.stderr.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_closed_pipe_is_quiet(good: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gpumemx", "replay", str(good)],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
