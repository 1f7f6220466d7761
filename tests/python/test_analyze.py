# SPDX-License-Identifier: BSD-3-Clause
"""``gpumemx analyze`` and `gpumemx.analyze`: tables, JSON, sentences, exit status, bad files.

The extension's part is stood in for here, so that every figure is known. The real one reads a file
in the tests at the end.
"""

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpumemx
import pytest
from conftest import gpumemx as command
from gpumemx import _core, cli
from snapshot_tools import MIB, device, recorded, snapshot, without_history

StandIn = Callable[..., None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Make the extension say that of any file: a dict, or an error that it raises."""

    def set_answer(answer: dict[str, Any] | Exception) -> None:
        def analyze_snapshot(path: str, progress_callback: Any = None) -> dict[str, Any]:
            if isinstance(answer, Exception):
                raise answer
            if progress_callback is not None:
                progress_callback(1, 2)
                progress_callback(2, 2)
            return answer

        monkeypatch.setattr(_core, "analyze_snapshot", analyze_snapshot, raising=False)

    return set_answer


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = cli.main(["analyze", *map(str, words)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def rows(text: str, title: str) -> list[list[str]]:
    """Return the rows of a table, split at two blanks."""
    lines = text[text.index(f"\n{title}") :].splitlines()
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("──")) + 1 :]
    table = body[: body.index("")]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table]


# --- tables


def test_the_tables_say_all_of_it(says: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    says(snapshot(device()))
    status, out, err = run(capsys, "a/s.pickle")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert out.splitlines()[0] == "a/s.pickle: torch 2.11"
    assert rows(out, "GPU 0: 5 events") == [
        ["at the peak", "2", "2.500 s", "600.00 MiB", "800.00 MiB"],
        ["at the end", "100.00 MiB", "800.00 MiB"],
    ]
    assert rows(out, "Fragmentation at the peak") == [
        ["800.00 MiB", "600.00 MiB", "200.00 MiB", "150.00 MiB", "120.00 MiB"]
    ]
    assert rows(out, "Alive at the peak, by allocation site") == [
        ["400.00 MiB", "66.7%", "2", "train.py:20"],
        ["150.00 MiB", "25.0%", "3", "[red]model.py[bold]:7"],
        ["30.00 MiB", "5.0%", "1", "(no frames)"],
        ["20.00 MiB", "3.3%", "1,234", "data.py:1"],
    ]
    assert rows(out, "Alive at the peak, by size of block")[1] == (
        ["580.00 MiB", "96.7%", "6", "above 1 MiB"]
    )
    assert rows(out, "Alive at the peak, by category")[0] == (
        ["450.00 MiB", "75.0%", "1,236", "activations"]
    )
    assert rows(out, "Segments that one small block holds") == [
        ["0x9f00", "64.00 MiB", "1.00 KiB", "train.py:20"],
        ["0x7f00", "20.00 MiB", "512 B", "data.py:1"],
    ]
    assert rows(out, "Out of memory") == [
        ["3", "300.00 MiB", "50.00 MiB", "600.00 MiB", "800.00 MiB", "The holes are too small."]
    ]
    assert "\n".join(map(str.rstrip, out.splitlines())).endswith(
        "GPU 0: Out of memory, asked for 300.00 MiB: The holes are too small.\n"
        "GPU 0: 25% of what was reserved (200.00 MiB) was unused, most of it in segments that live "
        "blocks\nhold: expandable_segments:True or gpumemx makes such holes usable."
    )


def test_top_adds_up_what_it_leaves_out(says: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    ooms = [{**device()["ooms"][0], "event": event} for event in (1, 3, 4)]
    says(snapshot(device(ooms=ooms)))
    _, out, _ = run(capsys, "s.pickle", "--top", "1")
    assert rows(out, "Alive at the peak, by allocation site") == [
        ["400.00 MiB", "66.7%", "2", "train.py:20"],
        ["200.00 MiB", "33.3%", "1,238", "3 others"],
    ]
    # These are few, and the sizes have an order of their own.
    assert [row[-1] for row in rows(out, "Alive at the peak, by size of block")] == (
        ["up to 1 MiB", "above 1 MiB"]
    )
    assert len(rows(out, "Alive at the peak, by category")) == 2
    assert len(rows(out, "Segments that one small block holds")) == 1
    assert [row[0] for row in rows(out, "Out of memory, 3 times")] == ["4"]


def test_each_device_has_its_tables_or_one_is_chosen(
    says: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    says(snapshot(device(0), device(3)))
    _, both, _ = run(capsys, "s.pickle")
    assert "\nGPU 0: 5 events" in both
    assert "\nGPU 3: 5 events" in both
    _, one, _ = run(capsys, "s.pickle", "--device", "3")
    assert "GPU 0" not in one
    assert one.splitlines()[1:] == both[both.index("\nGPU 3: 5 events") :].splitlines()
    status, out, err = run(capsys, "s.pickle", "--device", "1")
    assert (status, out) == (2, "")
    assert err == "gpumemx analyze: s.pickle: tells nothing of device 1 (of these: 0, 3)\n"


def test_nothing_recorded_and_nothing_allocated(
    says: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    says(snapshot())
    status, out, _ = run(capsys, "s.pickle")
    assert status == 0
    assert "Nothing was allocated on any device" in out
    _, _, err = run(capsys, "s.pickle", "--device", "0")
    assert "tells nothing of device 0 (of these: none)" in err


@pytest.mark.parametrize(
    ("state", "text"),
    [("off", "The recording was never on"), ("state only", "Only the state was recorded")],
)
def test_without_history_there_is_no_peak(
    state: str, text: str, says: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    says(snapshot(without_history(state)))
    _, out, _ = run(capsys, "s.pickle")
    assert f"GPU 0: {text}" in out
    assert "at the peak" not in out
    assert "Alive when the snapshot was made, by allocation site" in out
    assert "Fragmentation when the snapshot was made" in out
    assert rows(out, "GPU 0: 0 events") == [["at the end", "100.00 MiB", "800.00 MiB"]]


def test_what_a_file_does_not_tell_is_a_dash(
    says: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {**device()["ooms"][0], "device_free": None, "reserved": None}
    peak = {"event": 2, "time_us": None, "live": 600 * MIB, "reserved": None}
    made = device(
        peak=peak,
        reserved_now=None,
        ooms=[failed],
        fragmentation=holes(0, 0, 0, lonely_segments=[]),
    )
    says(snapshot(made))
    _, out, _ = run(capsys, "s.pickle")
    assert rows(out, "GPU 0: 5 events") == [
        ["at the peak", "2", "-", "600.00 MiB", "-"],
        ["at the end", "100.00 MiB", "-"],
    ]
    assert "Fragmentation" not in out
    assert "one small block" not in out
    assert rows(out, "Out of memory")[0][2:5] == ["-", "600.00 MiB", "-"]


def test_a_peak_before_the_first_event_has_no_number(
    says: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    peak = {"event": -1, "time_us": None, "live": 700 * MIB, "reserved": 800 * MIB}
    says(snapshot(device(peak=peak)))
    _, out, _ = run(capsys, "s.pickle")
    assert rows(out, "GPU 0: 5 events")[0][:4] == (["at the peak", "before all", "-", "700.00 MiB"])


def test_event_numbers_are_no_times(says: StandIn) -> None:
    numbers = {**device()["series"], "time_us": [0, 1, 2, 3, 4]}
    says(snapshot(device(series=numbers), device(1)))
    first, second = gpumemx.analyze("s.pickle").devices
    assert (first.series.timed, second.series.timed) == (False, True)


# --- sentences


def advice(says: StandIn, **changed: Any) -> list[str]:
    says(snapshot(device(**changed)))
    return gpumemx.analyze("s.pickle").devices[0].advice()


def holes(reserved: int, live: int, busy: int, **changed: Any) -> dict[str, Any]:
    found = device()["fragmentation"]
    return {
        **found,
        "reserved": reserved * MIB,
        "live": live * MIB,
        "free_in_busy_segments": busy * MIB,
        **changed,
    }


def test_at_most_two_sentences_and_the_failure_first(says: StandIn) -> None:
    said = advice(says)
    assert len(said) == 2
    assert said[0] == "Out of memory, asked for 300.00 MiB: The holes are too small."


@pytest.mark.parametrize(
    ("fragmentation", "text"),
    [
        (holes(640, 600, 40), "94% of what was reserved was in use: only less live memory helps"),
        (holes(800, 600, 150), "most of it in segments that live blocks hold"),
        (holes(800, 600, 50), "most of it in segments without a live block"),
    ],
)
def test_unused_memory_is_told_by_its_cause(
    fragmentation: dict[str, Any], text: str, says: StandIn
) -> None:
    said = advice(says, ooms=[], fragmentation=fragmentation)
    assert text in said[0]
    assert said[1] == (
        "The largest part of what was alive at the peak, 67% (400.00 MiB in 2 blocks), is from "
        "train.py:20."
    )


def test_many_small_sites_are_told_by_their_category(says: StandIn) -> None:
    alive = device()["alive_at_peak"]
    sites = [{"site": f"a.py:{i}", "bytes": 6 * MIB, "count": 1} for i in range(100)]
    said = advice(says, ooms=[], alive_at_peak={**alive, "by_site": sites})
    assert said[1] == (
        "What was alive at the peak is spread over 100 allocation sites; by category, most of it "
        "(75%): activations."
    )


def test_an_empty_device_has_a_sentence_too(says: StandIn) -> None:
    alive = {"by_site": [], "by_size_class": [], "by_category": []}
    peak = {"event": 0, "time_us": 1, "live": 0, "reserved": 0}
    said = advice(says, ooms=[], fragmentation=holes(0, 0, 0), peak=peak, alive_at_peak=alive)
    assert said == ["Nothing was alive."]


@pytest.mark.parametrize(
    ("recording", "text"),
    [
        ({"overflowed": True}, "The recording was full and lost its oldest events"),
        ({"baseline_bytes": 3 * MIB}, "3.00 MiB was live before the first event"),
        ({"unknown_frees": 1234}, "1,234 events free blocks that no event"),
    ],
)
def test_what_the_recording_leaves_out_is_said(
    recording: dict[str, Any],
    text: str,
    says: StandIn,
    capsys: pytest.CaptureFixture[str],
) -> None:
    says(snapshot(device(recording={**device()["recording"], **recording})))
    _, out, _ = run(capsys, "s.pickle")
    assert f"\nGPU 0: {text}" in out
    says(snapshot(device()))
    _, out, _ = run(capsys, "s.pickle")
    assert text not in out


# --- JSON and Python


def test_the_json_has_the_documented_form(
    says: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    made = device()
    says(snapshot(made))
    status, out, err = run(capsys, "s.pickle", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert list(found) == ["file", "schema", "devices"]
    assert (found["file"], found["schema"]) == ("s.pickle", "torch 2.11")
    (one,) = found["devices"]
    assert len(one.pop("advice")) == 2
    assert one.pop("notes") == []
    assert one == made


def test_the_json_may_go_to_a_file(
    says: StandIn, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    says(snapshot(device()))
    file = tmp_path / "out.json"
    status, out, _ = run(capsys, "s.pickle", "--json", file)
    assert status == 0
    assert "at the peak" in out
    assert json.loads(file.read_text())["schema"] == "torch 2.11"
    nowhere = tmp_path / "nowhere" / "out.json"
    status, out, err = run(capsys, "s.pickle", "--json", nowhere)
    assert status == 2
    assert err == f"gpumemx analyze: {nowhere}: No such file or directory\n"
    assert "at the peak" in out


def test_the_function_returns_the_figures(says: StandIn) -> None:
    says(snapshot(device(), device(1)))
    found = gpumemx.analyze(Path("a/s.pickle"))
    assert isinstance(found, gpumemx.Analysis)
    assert (found.file, len(found.devices)) == ("a/s.pickle", 2)
    first = found.devices[0]
    assert (first.peak.live, first.peak.event) == (600 * MIB, 2)
    assert first.by_site[0].name == "train.py:20"
    assert first.fragmentation.unused == 200 * MIB
    assert first.series.label == "GPU 0"
    lines = str(found).splitlines()
    assert lines[:2] == [
        "a/s.pickle: torch 2.11",
        "GPU 0: live peak 600.00 MiB, reserved 800.00 MiB",
    ]
    assert len(lines) == 7
    with pytest.raises(AttributeError):
        first.events = 3  # type: ignore[misc]


def test_progress_is_told(says: StandIn) -> None:
    says(snapshot(device()))
    seen: list[tuple[int, int]] = []
    gpumemx.analyze("s.pickle", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_a_large_file_shows_a_bar_on_a_terminal(
    says: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    says(snapshot(device()))
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    file = tmp_path / "large.pickle"
    file.write_bytes(b"")
    assert cli.main(["analyze", str(file), "--json"]) == 0
    assert shown.getvalue() == ""
    with file.open("r+b") as large:
        large.truncate(20 << 20)
    assert cli.main(["analyze", str(file), "--json"]) == 0
    assert "large.pickle: reading" in shown.getvalue()
    assert "100%" in shown.getvalue()


# --- what goes wrong


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no pickle file"), "no pickle file"),
        (ValueError("s.pickle: ends in the middle\nof byte 7"), "ends in the middle of byte 7"),
        (FileNotFoundError(2, "No such file or directory"), "No such file or directory"),
        (OSError("cannot be read"), "cannot be read"),
    ],
)
def test_a_bad_file_is_one_line(
    error: Exception, text: str, says: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    says(error)
    assert run(capsys, "s.pickle") == (2, "", f"gpumemx analyze: s.pickle: {text}\n")
    with pytest.raises(gpumemx.TraceError) as raised:
        gpumemx.analyze("s.pickle")
    assert (raised.value.path, raised.value.reason) == ("s.pickle", text)


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_core, "analyze_snapshot", interrupted, raising=False)
    assert cli.main(["analyze", "s.pickle"]) == 130


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "-1"], "argument --device: '-1' is not a whole number, 0 or more"),
        (["--device", "two"], "argument --device: 'two' is not a whole number, 0 or more"),
        (["--top", "1.5"], "argument --top: '1.5' is not a whole number, 0 or more"),
        (["--no-such"], "unrecognized arguments: --no-such"),
    ],
)
def test_a_bad_argument_is_status_2(arguments: list[str], text: str) -> None:
    done = command("analyze", "s.pickle", *arguments)
    assert done.returncode == 2
    assert text in done.stderr


# --- with the real reader

real = pytest.mark.skipif(
    not hasattr(_core, "analyze_snapshot"), reason="the extension has no snapshot reader"
)


@real
def test_a_real_file_is_analyzed(tmp_path: Path) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(pickle.dumps(recorded(), protocol=4))
    done = command("analyze", file, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)["devices"]
    assert found["peak"]["live"] == 12 * MIB
    assert found["live_now"] == 8 * MIB
    assert found["reserved_now"] == 20 * MIB
    assert "at the peak" in command("analyze", file).stdout


@real
def test_a_name_that_is_no_text_is_opened(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xff.pickle")
    file.write_bytes(pickle.dumps(recorded(), protocol=4))
    assert gpumemx.analyze(file).devices[0].peak.live == 12 * MIB
    for encoding in ("utf-8", "ascii"):
        done = command("analyze", file, env={**os.environ, "PYTHONIOENCODING": encoding})
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{tmp_path}/\\udcff.pickle: ")


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@real
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{}\n", id="text"),
        pytest.param(pickle.dumps(recorded(), protocol=4)[:300], id="truncated"),
        pytest.param(pickle.dumps(_Code()), id="code"),
        pytest.param(pickle.dumps([1, 2]), id="another pickle"),
    ],
)
def test_a_real_bad_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(content)
    done = command("analyze", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpumemx analyze: {file}: ")
    assert len(done.stderr.splitlines()) == 1
