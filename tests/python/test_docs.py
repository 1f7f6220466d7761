# SPDX-License-Identifier: BSD-3-Clause
"""What the documentation shows runs: pages with programs, and an example for every function."""

import doctest
import importlib
import re
from pathlib import Path

import gpumemx
import pytest
from torch_tools import program

ROOT = Path(__file__).parents[2]
PAGES = ("out-of-memory", "memory-does-not-come-back", "numbers-do-not-match-nvidia-smi")
FUNCTIONS = [
    name
    for name in gpumemx.__all__
    if name[0].islower() and callable(getattr(gpumemx, name))  # classes begin with a capital
]


@pytest.mark.torch
@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_a_program_that_runs(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    done = program("\n".join(blocks), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    if page == "out-of-memory":
        # 16 ** 9 bytes are 64 GiB: what fits depends on the machine.
        assert re.search(r"^(16|8)$", done.stdout, re.MULTILINE), done.stdout
        assert "train_step ran out of memory with batch size 64" in done.stderr
        assert "left out: errors held no tensors" in done.stdout


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_that_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    function = getattr(gpumemx, name)
    module = importlib.import_module(function.__module__)
    (found,) = (
        test for test in doctest.DocTestFinder(recurse=False).find(function, name, module=module)
    )
    run = [e for e in found.examples if not e.options.get(doctest.SKIP)]
    assert any("gpumemx." in e.source for e in run), f"{name} has no example that is run"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    said: list[str] = []
    failed, _ = runner.run(found, out=said.append, clear_globs=True)
    assert failed == 0, "".join(said)


def test_there_are_functions() -> None:
    assert {"recover", "oom_guard", "retry_on_oom", "last_oom", "monitor"} <= set(FUNCTIONS)


def test_the_pages_name_what_there_is() -> None:
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for name in re.findall(r"gpumemx\.(\w+)", text):
            assert name in gpumemx.__all__, (page, name)
        for file, anchor in re.findall(r"\]\(([\w-]+\.md)(?:#([\w-]+))?\)", text):
            target = (ROOT / "docs" / file).read_text(encoding="utf-8")
            heads = {
                re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-")
                for head in re.findall(r"^#+ (.*)$", target, re.MULTILINE)
            }
            assert not anchor or anchor in heads, (page, file, anchor, heads)


def test_the_causes_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "out-of-memory.md").read_text(encoding="utf-8")
    source = (ROOT / "csrc" / "core" / "oom.cpp").read_text(encoding="utf-8")
    causes = set(re.findall(r'case OomCause::\w+: return "([a-z ]+)";', source))
    assert causes - {"shutting down"} == set(re.findall(r"^\| `([a-z ]+)` \|", text, re.MULTILINE))
