# SPDX-License-Identifier: BSD-3-Clause
"""Installing: where settings come from, what is refused in which words, what is not started."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import gpumemx
import pytest
from gpumemx import _adapter
from torch_tools import clean_environment, output, program

NEEDS_ADAPTER = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]
pytestmark = NEEDS_ADAPTER

SHOW = """
for s in gpumemx.settings():
    if s.source != "default": print(s.key, s.value, s.source, sep="|")
"""
INSTALL = "import gpumemx\ngpumemx.install_allocator({})\n"


def refusal(arguments: str = "", before: str = "", **environment: str) -> str:
    """Return what a refused installation says: the error's class and text."""
    return output(
        "import gpumemx, logging\n"
        + before
        + f"\ntry:\n    gpumemx.install_allocator({arguments})\n"
        "except Exception as e: print(type(e).__name__, e, sep=': ')\n",
        **environment,
    ).strip()


# --- settings


def test_each_source_is_read_and_named() -> None:
    shown = output(
        INSTALL.format("slack=0.25, background=True") + SHOW,
        PYTORCH_ALLOC_CONF="gpumemx_cap:3GiB, expandable_segments:True,gpumemx_price:1",
        PYTORCH_CUDA_ALLOC_CONF="gpumemx_hit_scan:7",
        GPUMEMX_CONF="max_aliases:5, price:2,slack:0.5,",
    )
    assert shown.splitlines() == [
        "cap|3GiB|PYTORCH_ALLOC_CONF",
        "background|true|install_allocator()",
        "slack|0.25|install_allocator()",
        "max_aliases|5|GPUMEMX_CONF",
        "hit_scan|7|PYTORCH_CUDA_ALLOC_CONF",
        "price|2|GPUMEMX_CONF",
        "expandable_segments|True|PYTORCH_ALLOC_CONF",
    ]


def test_settings_before_the_installation_are_those_that_would_be() -> None:
    environment = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,gpumemx_cap:1GiB",
        "GPUMEMX_CONF": "slack:0.5",
    }
    before = output("import gpumemx" + SHOW, **environment)
    assert before == output(INSTALL.format("") + SHOW, **environment)
    notes = output("import gpumemx\nprint(gpumemx.settings()[-1].note)", **environment)
    assert notes.startswith("no work left: ")


def test_sizes_are_bytes_or_text() -> None:
    for value in ("3221225472", "'3GiB'", "'3 gib'"):
        assert "cap|3GiB|install_allocator()" in output(INSTALL.format(f"cap={value}") + SHOW)


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (
            "capp=1",
            {},
            "install_allocator(): there is no setting 'capp'; the nearest name is 'cap'",
        ),
        ("cap='lots'", {}, "install_allocator(): 'lots' is no value for cap, which takes a size"),
        ("", {"GPUMEMX_CONF": "slak:1"}, "GPUMEMX_CONF: there is no setting 'slak'; the nearest"),
        ("", {"GPUMEMX_CONF": "cap=1GiB"}, "GPUMEMX_CONF: 'cap=1GiB' has '=' in the place of ':'"),
        (
            "",
            {"PYTORCH_ALLOC_CONF": "gpumemx_slak:1"},
            "PYTORCH_ALLOC_CONF: there is no setting 'gpumemx_slak'; the nearest name is "
            "'gpumemx_slack'",
        ),
        (
            "",
            {"PYTORCH_CUDA_ALLOC_CONF": "gpumemx_slack:x"},
            "PYTORCH_CUDA_ALLOC_CONF: 'x' is no value for gpumemx_slack",
        ),
        (
            "",
            {"GPUMEMX_CAP": "1GiB"},
            "environment variable GPUMEMX_CAP means nothing to gpumemx; write GPUMEMX_CONF=cap:",
        ),
        (
            "",
            {"GPUMEMX_DISABEL": "1"},
            "environment variable GPUMEMX_DISABEL means nothing to gpumemx; the nearest name is "
            "GPUMEMX_DISABLE",
        ),
        ("", {"GPUMEMX_DISABLE": "maybe"}, "GPUMEMX_DISABLE: 'maybe' is neither 1 nor 0"),
        ("max_split_size_mb=64", {}, "install_allocator(): max_split_size_mb is a key of torch's"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(
    arguments: str, environment: dict[str, str], text: str
) -> None:
    said = refusal(arguments, **environment)
    assert said.startswith(f"SettingError: {text}"), said
    assert issubclass(gpumemx.SettingError, ValueError)


def test_a_value_of_another_type_is_a_type_error() -> None:
    assert refusal("cap=[1]") == (
        "TypeError: install_allocator(): cap is a str, int, float or bool, not list"
    )


def test_torchs_own_mistakes_are_torchs_to_say() -> None:
    said = refusal(PYTORCH_CUDA_ALLOC_CONF="no_such_key:1")
    assert said.startswith("InstallError: gpumemx cannot be installed: torch refuses its own")
    assert "no_such_key" in said


def test_own_keys_pass_torchs_parser_later_too() -> None:
    output(
        INSTALL.format("")
        + "import torch\ntorch._C._accelerator_setAllocatorSettings('gpumemx_slack:0.5')\n"
        "print(gpumemx.settings()[3].source)"
    )


# --- refusals


def test_another_backend_is_refused() -> None:
    said = refusal(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert said.startswith(
        "InstallError: gpumemx cannot be installed: torch runs on its 'cudaMallocAsync' allocator"
    )
    assert "PYTORCH_ALLOC_CONF" in said


def test_a_second_call_is_fine_unless_it_asks_for_something_else() -> None:
    shown = output(
        """
        import gpumemx
        gpumemx.install_allocator(cap="2GiB")
        gpumemx.install_allocator(cap=2 << 30)
        gpumemx.install_allocator()
        assert gpumemx.is_installed()
        try:
            gpumemx.install_allocator(cap="3GiB")
        except RuntimeError as error:
            print(error)
        """
    )
    assert shown.startswith(
        "gpumemx is installed already with cap:2GiB (from install_allocator()), and settings "
        "cannot change while a process runs; cap:3GiB has to be given to the first "
        "install_allocator()"
    )


def test_disabled_leaves_torchs_allocator_and_logs_it_once() -> None:
    done = program(
        """
        import gpumemx, torch
        gpumemx.install_allocator(cap="1GiB")
        gpumemx.install_allocator()
        assert not gpumemx.is_installed()
        assert torch.cuda.get_allocator_backend() == "native"
        """,
        GPUMEMX_DISABLE="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "GPUMEMX_DISABLE is set: torch keeps its own CUDA allocator\n"


def test_too_late_says_what_is_known_and_what_to_do() -> None:
    started = """
from gpumemx import _adapter
class Late:  # an adapter in a process whose CUDA has started
    def __getattr__(self, name): return getattr(real, name)
    def cuda_started(self): return True
real = _adapter.load()
late = Late()
_adapter.find = lambda torch: late
"""
    said = refusal(before=started)
    assert said.startswith(
        "InstallError: CUDA has started already in this process (what did is not"
    )
    for part in ("restart the kernel", "gpumemx run", "install_allocator(late=True)"):
        assert part in said
    # torch calls what is queued when it starts CUDA, with the program's frames below.
    seen = """
import torch
from gpumemx import allocator
allocator.watch_cuda_start()
def train():
    for call, _ in torch.cuda._queued_calls:
        if call is allocator._note_first_use: call()
train()
"""
    said = refusal(before=seen + started)
    assert "(by <string>, line 8" in said, said


def test_importing_torch_first_arms_the_watch() -> None:
    assert (
        output(
            "import torch, gpumemx\n"
            "from gpumemx import allocator\n"
            "print(sum(c is allocator._note_first_use for c, _ in torch.cuda._queued_calls))\n"
        )
        == "1\n"
    )


# --- which module


def test_a_torch_without_a_module_is_one_clear_sentence() -> None:
    said = refusal(before="import torch\ntorch.__version__ = '2.99.1+cu130'")
    assert said.startswith(
        "InstallError: PyTorch is 2.99.1+cu130, and this gpumemx has adapters for 2."
    )
    assert "install gpumemx again in this environment" in said
    assert len(said.splitlines()) == 1
    # What only reads does not raise.
    shown = output(
        "import torch\ntorch.__version__ = '2.99.1'\nimport gpumemx\n"
        "print(gpumemx.memory_info(), gpumemx.memory_summary(), gpumemx.clear_cache(), sep='\\n')\n"
        "with gpumemx.monitor('x') as m: pass\nprint(m.report())"
    )
    assert shown.count("PyTorch is 2.99.1, and this gpumemx has") == 4


def test_a_torch_without_cuda_is_one_clear_sentence() -> None:
    said = refusal(before="import torch\ntorch.version.cuda = None")
    assert said.endswith("is built without CUDA")
    assert said.startswith("InstallError: this PyTorch (2.")


def test_a_module_that_cannot_be_loaded_is_one_clear_sentence(tmp_path: Path) -> None:
    said = refusal(
        before="import torch, importlib\n"
        "from gpumemx import _adapter\n"
        "def broken(name):\n"
        "    if name.startswith('gpumemx._torch'): raise ImportError('undefined symbol: x')\n"
        "    return real(name)\n"
        "real, _adapter.importlib.import_module = importlib.import_module, broken\n"
    )
    assert "cannot be loaded: undefined symbol: x; install gpumemx again" in said


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.14.1", "_torch_2_14"),
        ("2.9.0+cu128", "_torch_2_9"),
        ("3.0.0a0+git1234", "_torch_3_0"),
        ("main", "_torch_unknown"),
    ],
)
def test_the_module_is_named_after_the_minor(version: str, name: str) -> None:
    assert _adapter.module_name(version) == name


def test_the_adapter_has_what_python_calls() -> None:
    names = [n for n in vars(_adapter.Adapter) if not n.startswith("_")]
    assert output(
        "from gpumemx import _adapter\na = _adapter.load()\n"
        f"print([n for n in {names} if not hasattr(a, n)], a.torch_version, a.version)"
    ).startswith("[] 2.")


# --- what is not started


READS = """
import gpumemx
gpumemx.is_installed(), gpumemx.settings()
gpumemx.memory_info(), gpumemx.memory_info(3), gpumemx.memory_summary(), gpumemx.clear_cache()
with gpumemx.monitor("x") as m:
    pass
m.report(), m.peak, m.to_dict()
"""


def test_the_compiled_parts_have_no_standard_library_of_their_own() -> None:
    # See cmake/shared_libstdcxx.cmake. None of ours may bring a CUDA runtime either: it is torch's.
    if shutil.which("readelf") is None:
        pytest.skip("readelf is missing")
    package = Path(output("import gpumemx; print(gpumemx.__path__[0])").strip())
    modules = sorted(package.glob("_*.so"))
    assert modules
    for module in modules:
        text = subprocess.run(
            ["readelf", "--dynamic", "--wide", module], capture_output=True, text=True, check=True
        ).stdout
        needed = re.findall(r"NEEDED.*\[(.*)\]", text)
        assert "libstdc++.so.6" in needed, (module, needed)
        assert not any(name.startswith(("libcudart", "libcuda.")) for name in needed), needed


def test_reading_imports_no_torch() -> None:
    assert (
        output("import sys" + READS + "print([m for m in sys.modules if 'torch' in m])") == "[]\n"
    )


def test_import_install_and_reading_start_no_cuda() -> None:
    # Without libcuda in the process there is no context. (The runtime, libcudart, is torch's.)
    started = "any('libcuda.so' in line for line in open('/proc/self/maps'))"
    program_text = (
        f"import torch\nprint({started})\n{READS}\ngpumemx.install_allocator()\n{READS}\n"
        f"print({started}, torch.cuda.is_initialized())"
    )
    if "True" in output("import torch\nprint(torch.cuda.is_available())"):
        # With a device NVML is asked for their number, never the driver.
        program_text = program_text.replace("print(", "str(", 1)
    assert output(program_text).split()[-2:] == ["False", "False"]


def test_without_torch_everything_says_so(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(\"No module named 'torch'\", "
        "name='torch')\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    path = [str(tmp_path), *filter(None, [clean_environment().get("PYTHONPATH")])]
    said = refusal(PYTHONPATH=":".join(path))
    assert said.startswith("InstallError: PyTorch is not installed in this Python environment (")
    assert sys.executable in said
