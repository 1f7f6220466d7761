# SPDX-License-Identifier: BSD-3-Clause
"""HTML pages: what is drawn, what is escaped, and that a real browser draws it quickly."""

import base64
import json
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpumemx
import numpy as np
import pytest
from conftest import TRACES
from conftest import gpumemx as command
from gpumemx import _core, cli
from gpumemx.errors import MissingPackageError
from gpumemx.page import MAX_POINTS, Alive, Series, aggregate, largest, write_page
from snapshot_tools import MIB, device, recorded, snapshot, without_history

GIB = 1 << 30
HOSTILE = "<img src=http://example.com/x onerror=alert(1)></script><a href='http://a.b'>x</a>%{y}"
needs_plotly = pytest.mark.skipif(find_spec("plotly") is None, reason="plotly is not installed")


def series(n: int, seed: int = 1, **changed: Any) -> Series:
    """Return a random series of n events with one spike in live and another in reserved."""
    random = np.random.default_rng(seed)
    live = random.integers(0, GIB, n)
    reserved = live + random.integers(0, GIB, n)
    if n > 100:
        live[n // 3], reserved[n // 2] = 7 * GIB, 9 * GIB
    values = {
        "label": "native",
        "time_us": np.arange(n) * 10,
        "live": live,
        "reserved": reserved,
        **changed,
    }
    return Series(**values)


# --- aggregation


@pytest.mark.parametrize("n", [0, 1, MAX_POINTS, MAX_POINTS + 1, 99_999, 1_000_003])
def test_few_points_are_left_and_no_peak_is_lost(n: int) -> None:
    one = series(n)
    line = aggregate(one)
    assert len(line.event) <= MAX_POINTS
    assert len(line.event) == n or len(line.event) > MAX_POINTS // 2
    assert (np.diff(line.event) > 0).all()
    live, reserved = np.asarray(one.live), np.asarray(one.reserved)
    assert (line.live == live[line.event]).all()
    assert (line.reserved == reserved[line.event]).all()
    if n:
        assert (line.event[0], line.event[-1]) == (0, n - 1)
        for drawn, whole in ((line.live, live), (line.reserved, reserved)):
            assert (drawn.min(), drawn.max()) == (whole.min(), whole.max())


def test_unknown_values_stay_unknown() -> None:
    n = 3 * MAX_POINTS
    line = aggregate(series(n, reserved=[None] * n))
    assert np.isnan(line.reserved).all()
    half = [None] * (n // 2) + [GIB] * (n - n // 2)
    line = aggregate(series(n, reserved=half))
    assert np.isnan(line.reserved[0])
    assert line.reserved[-1] == GIB


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="series 'native' differ: time_us 3, live 2, reserved 3"):
        aggregate(series(3, live=[1, 2]))


def test_the_largest_come_first_and_the_rest_is_added_up() -> None:
    made = [Alive(f"a.py:{size}", size, 1) for size in (5, 40, 3, 20)]
    assert [one.name for one in largest(made, 3)] == ["a.py:40", "a.py:20", "a.py:5", "a.py:3"]
    assert largest(made, 2)[2] == Alive("2 others", 8, 2)
    assert largest([], 2) == []


# --- the file


def figures(page: str) -> list[dict[str, Any]]:
    found = re.search(r"^const figures = (.*);$", page, re.MULTILINE)
    assert found is not None
    return json.loads(found[1])


def values(drawn: Any) -> list[float]:
    """Return the numbers of an axis, which plotly packs where they are an array."""
    if isinstance(drawn, list):
        return drawn
    return np.frombuffer(base64.b64decode(drawn["bdata"]), drawn["dtype"]).tolist()


@needs_plotly
def test_a_page_has_a_chart_for_each_group(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    two = [series(9, chart="a"), series(9, label="gpumemx", chart="a", reserved=[GIB] * 9)]
    other = series(9, 2, chart="b", reserved=[None] * 9)
    alive = {"bars": [Alive("a.py:1", 3 * GIB, 2)], "empty": []}
    write_page(file, "A <title>", [*two, other], alive, ["1 < 2."])
    text = file.read_text(encoding="utf-8")
    assert "<title>A &lt;title&gt;</title>" in text
    assert "<p>1 &lt; 2.</p>" in text
    first, second, bars = figures(text)
    # Their live bytes are the same: drawn once.
    names = [trace["name"] for trace in first["data"]]
    assert names == ["reserved, native", "live", "reserved, gpumemx"]
    assert [trace["name"] for trace in second["data"]] == ["live"]
    assert bars["data"][0]["x"] == [3.0]
    assert bars["data"][0]["customdata"] == [["a.py:1", "2", "100.0%"]]
    for axis in (first["layout"]["yaxis"], bars["layout"]["xaxis"]):
        assert axis["title"]["text"] == "GiB"


@needs_plotly
def test_other_live_bytes_are_drawn_for_each(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_page(file, "t", [series(9), series(8, label="gpumemx")], {}, [])
    (figure,) = figures(file.read_text(encoding="utf-8"))
    names = [trace["name"] for trace in figure["data"]]
    assert names == ["reserved, native", "live, native", "reserved, gpumemx", "live, gpumemx"]


@needs_plotly
def test_without_times_events_are_the_axis(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    same, numbers = series(3, time_us=[7] * 3), series(3, time_us=[0, 40, 90], timed=False)
    for one, x in ((same, [0, 1, 2]), (numbers, [0, 40, 90])):
        write_page(file, "t", [one], {}, [])
        (figure,) = figures(file.read_text(encoding="utf-8"))
        assert figure["layout"]["xaxis"]["title"]["text"] == "event"
        assert values(figure["data"][0]["x"]) == x


@needs_plotly
def test_the_library_is_in_it_once_and_the_data_is_small(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty.html", tmp_path / "full.html"
    write_page(empty, "t", [], {}, [])
    many = [series(1_000_000, seed) for seed in range(4)]
    write_page(full, "t", many, {}, [])
    assert empty.stat().st_size < 6_000_000
    assert full.stat().st_size - empty.stat().st_size < 1_000_000


@needs_plotly
def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_page(tmp_path / "nowhere" / "page.html", "t", [], {}, [])


def test_without_plotly_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    text = "an HTML page needs the package plotly: pip install 'plotly>=6'"
    file = tmp_path / "page.html"
    with pytest.raises(MissingPackageError, match=re.escape(text)):
        write_page(file, "t", [], {}, [])
    for name in ("replay", "analyze"):
        # Said before any work is done.
        assert cli.main([name, str(good), "--html", str(file)]) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", f"gpumemx {name}: --html: {text}\n")
    assert not file.exists()


# --- the series of a replay


def test_a_replay_keeps_its_series_when_asked(shipped: Path) -> None:
    plain = gpumemx.replay(shipped)
    assert plain.series is None
    result = gpumemx.replay(shipped, series=True)
    found = result.series
    assert found is not None
    assert found.label == "gpumemx"
    assert len(found.time_us) == len(found.live) == len(found.reserved) == result.events
    assert max(found.live) == result.live_peak_bytes == plain.live_peak_bytes
    assert max(found.reserved) == result.reserved_peak_bytes == plain.reserved_peak_bytes
    assert list(plain.to_dict()) == list(result.to_dict())


def test_the_series_is_exact_where_every_event_can_be_drawn(good: Path) -> None:
    found = gpumemx.replay(good, series=True).series
    assert found is not None
    assert [size // MIB for size in found.live] == [32, 96, 64, 0]
    assert [size // MIB for size in found.reserved[:2]] == [32, 96]
    failed = gpumemx.replay(good, series=True, capacity="95MiB").series
    assert failed is not None
    assert list(failed.live) == [32 * MIB]


# --- the command


@needs_plotly
def test_a_replay_writes_a_page(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = command("replay", good, TRACES[0], "--html", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "peak live" in done.stdout
    text = file.read_text(encoding="utf-8")
    assert "gpumemx replay: good.npz, fsdp_streams.npz" in text
    titles = [figure["layout"]["title"]["text"] for figure in figures(text)]
    assert titles == ["good.npz", "fsdp_streams.npz"]


@needs_plotly
def test_a_snapshots_replay_shows_who_was_alive(good: Path, tmp_path: Path) -> None:
    snapshot_file, file = tmp_path / "s.pickle", tmp_path / "page.html"
    snapshot_file.write_bytes(pickle.dumps(recorded(), protocol=4))
    policies = "gpumemx,native,expandable"
    done = command("replay", snapshot_file, good, "--policy", policies, "--html", file)
    assert (done.returncode, done.stderr) == (0, "")
    drawn = figures(file.read_text(encoding="utf-8"))
    titles = [figure["layout"]["title"]["text"] for figure in drawn]
    alive = "s.pickle, GPU 0: alive at the peak, by allocation site"
    assert titles == ["s.pickle", "good.npz", alive]
    names = [trace["name"] for trace in drawn[0]["data"]]
    assert names == ["reserved, gpumemx", "live", "reserved, native", "reserved, expandable"]


@needs_plotly
def test_a_page_that_cannot_be_written_is_one_line(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "page.html"
    done = command("replay", good, "--html", file)
    assert done.returncode == 2
    assert done.stderr == f"gpumemx replay: {file}: No such file or directory\n"
    assert "peak live" in done.stdout


@needs_plotly
def test_an_analysis_writes_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = snapshot(device(0), without_history("off") | {"device": 1})
    monkeypatch.setattr(_core, "analyze_snapshot", lambda *_: made, raising=False)
    file = tmp_path / "page.html"
    assert cli.main(["analyze", "s.pickle", "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    titles = [figure["layout"]["title"]["text"] for figure in figures(text)]
    assert titles == [
        "GPU 0",
        "GPU 0: Alive at the peak, by allocation site",
        "GPU 1: Alive when the snapshot was made, by allocation site",
    ]
    assert "<p>GPU 1: The recording was never on" in text


# --- in a browser


def _why_no_browser() -> str:
    if find_spec("plotly") is None or find_spec("playwright") is None:
        return "plotly or playwright is not installed"
    if _browser_program() is None:
        return "there is no Chromium: apt-get install chromium-headless-shell"
    return ""


def _browser_program() -> str | None:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a headless browser; skip without one, or fail where GPUMEMX_REQUIRE_BROWSER asks."""
    if reason := _why_no_browser():
        if os.environ.get("GPUMEMX_REQUIRE_BROWSER") == "1":
            pytest.fail(f"GPUMEMX_REQUIRE_BROWSER=1, but {reason}", pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Its sandbox does not work as root, and only pages of these tests are opened.
        started = playwright.chromium.launch(
            executable_path=_browser_program(), args=["--no-sandbox"]
        )
        yield started
        started.close()


DRAWN = """n => [...document.querySelectorAll(".js-plotly-plot")].filter(
  (chart) => chart.querySelector(".scatterlayer .js-line, .barlayer .point")).length === n"""
SHAPES = """() => [...document.querySelectorAll(".js-plotly-plot")].map((chart) => ({
  traces: chart.data.length,
  lines: chart.querySelectorAll(".scatterlayer .js-line").length,
  bars: chart.querySelectorAll(".barlayer .point").length,
  text: [...chart.querySelectorAll("text")].map((t) => t.textContent),
}))"""


class Opened:
    """A page in a browser, with what it did: until all charts were drawn, and how long it took."""

    def __init__(self, browser: Any, file: Path, charts: int, scheme: str = "light") -> None:
        self.page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        began = time.monotonic()
        self.page.goto(file.as_uri())
        self.page.wait_for_function(DRAWN, arg=charts, timeout=20_000)
        self.seconds = time.monotonic() - began
        self.charts: list[dict[str, Any]] = self.page.evaluate(SHAPES)

    def colour(self, selector: str, what: str) -> tuple[int, ...]:
        script = f"getComputedStyle(document.querySelector('{selector}')).{what}"
        return tuple(int(number) for number in re.findall(r"\d+", self.page.evaluate(script))[:3])


@pytest.mark.browser
def test_a_browser_draws_a_million_events_quickly(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    policies = [
        series(1_000_000, 1, label=label, reserved=np.random.default_rng(i).integers(0, GIB, 10**6))
        for i, label in enumerate(("gpumemx", "native", "expandable"))
    ]
    alive = {"by site": [Alive(f"a.py:{i}", i << 20, i) for i in range(1, 5000)]}
    write_page(file, "t", policies, alive, [])
    opened = Opened(browser, file, charts=2)
    lines, bars = opened.charts
    assert (lines["traces"], lines["lines"], lines["bars"]) == (4, 4, 0)
    assert (bars["traces"], bars["lines"], bars["bars"]) == (1, 0, 26)
    assert "4,974 others" in bars["text"]
    assert "live peak 7.000 GiB" in lines["text"]
    assert opened.errors == []
    assert opened.requests == [file.as_uri()]
    assert opened.seconds < 5


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_day_and_by_night(scheme: str, browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_page(file, "t", [series(9)], {}, [])
    opened = Opened(browser, file, charts=1, scheme=scheme)
    back = opened.colour("body", "backgroundColor")
    opened.page.wait_for_function(
        "c => getComputedStyle(document.querySelector('.xtick text')).fill === c",
        arg="rgb(228, 228, 228)" if scheme == "dark" else "rgb(34, 34, 34)",
    )
    assert (sum(back) < 3 * 128) == (scheme == "dark")
    # And follows when it is changed.
    other = "light" if scheme == "dark" else "dark"
    opened.page.emulate_media(color_scheme=other)
    opened.page.wait_for_function(
        "c => getComputedStyle(document.querySelector('.xtick text')).fill === c",
        arg="rgb(228, 228, 228)" if other == "dark" else "rgb(34, 34, 34)",
    )
    assert opened.errors == []


@pytest.mark.browser
def test_names_in_a_file_are_text_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    one = series(9, label=HOSTILE, chart=HOSTILE)
    other = series(9, 2, label="other", chart=HOSTILE)
    alive = {HOSTILE: [Alive(HOSTILE, GIB, 1), Alive(f"b{HOSTILE}", GIB, 1)]}
    write_page(file, HOSTILE, [one, other], alive, [HOSTILE])
    opened = Opened(browser, file, charts=2)
    lines, bars = opened.charts
    assert lines["traces"] == 4
    assert f"live, {HOSTILE}" in lines["text"]
    assert HOSTILE in bars["text"]
    assert bars["bars"] == 2
    opened.page.hover(".barlayer .point >> nth=0", force=True)
    opened.page.wait_for_selector("#chart1 .hoverlayer .hovertext")
    hover = opened.page.text_content("#chart1 .hoverlayer")
    assert HOSTILE in hover
    assert "1.000 GiB, 50.0%, blocks: 1" in hover
    assert opened.page.locator("img, a").count() == opened.page.locator(".modebar a").count()
    assert (opened.errors, opened.requests) == ([], [file.as_uri()])


@pytest.mark.browser
def test_a_browser_draws_what_the_commands_write(
    browser: Any, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "replay.html"
    assert command("replay", good, *TRACES, "--html", file).returncode == 0
    opened = Opened(browser, file, charts=1 + len(TRACES))
    assert [chart["lines"] for chart in opened.charts] == [2] * (1 + len(TRACES))
    assert opened.errors == []

    monkeypatch.setattr(_core, "analyze_snapshot", lambda *_: snapshot(device()), raising=False)
    file = tmp_path / "analyze.html"
    assert cli.main(["analyze", "s.pickle", "--html", str(file)]) == 0
    opened = Opened(browser, file, charts=2)
    assert [(chart["lines"], chart["bars"]) for chart in opened.charts] == [(2, 0), (0, 4)]
    assert "train.py:20" in opened.charts[1]["text"]
    assert opened.errors == []
