# SPDX-License-Identifier: BSD-3-Clause
"""``gpumemx run``: a program as python would run it, with gpumemx installed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch_tools import clean_environment, python

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]

LOOK = """
import os, sys
print(sys.argv, os.path.realpath(sys.path[0]), __name__, __package__ or "")
print(__file__, sys.modules["__main__"].__dict__ is globals())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "beside.py").write_text("value = 5\n")
    path = tmp_path / "prog.py"
    path.write_text(LOOK + "import beside, gpumemx\nprint(gpumemx.is_installed())\n")
    return path


def run(*arguments: object, cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    done = python("-m", "gpumemx", "run", *arguments, cwd=cwd, **environment)
    return done.returncode, done.stdout, done.stderr


def plain(*arguments: object, cwd: Path | None = None) -> tuple[int, str, str]:
    done = python(*arguments, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def test_a_script_sees_what_it_would_see_under_python(program: Path) -> None:
    for name, folder in ((program, None), ("../prog.py", program.parent / "sub")):
        arguments = (name, "-m", "--set", "x", "--", "-h")
        ours, pythons = run(*arguments, cwd=folder), plain(*arguments, cwd=folder)
        assert ours[0] == pythons[0] == 0, ours
        assert ours[1].splitlines()[:2] == pythons[1].splitlines()[:2]
        assert (ours[1].splitlines()[2], pythons[1].splitlines()[2]) == ("True", "False")


def test_a_module_sees_what_it_would_see_under_python(program: Path) -> None:
    package = program.parent / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(LOOK + "from . import other\n")
    (package / "other.py").write_text("")
    for name in ("pack", "prog"):
        ours = run("-m", name, "-x", "--set", cwd=program.parent)
        pythons = plain("-m", name, "-x", "--set", cwd=program.parent)
        assert ours[0] == 0, ours
        assert ours[1].splitlines()[:2] == pythons[1].splitlines()[:2]


def test_a_folder_with_a_main_is_run(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(LOOK)
    ours, pythons = run("app", "1", cwd=tmp_path), plain("app", "1", cwd=tmp_path)
    assert ours == pythons


ENDS = {
    "falls off": "pass",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('why')",
    "exit none": "raise SystemExit",
    "_exit": "import os; os._exit(4)",
    "raises": "def f():\n    raise ValueError('wanted')\nf()",
    "interrupt": "raise KeyboardInterrupt",
    "no such name": "undefined",
    "syntax": "x = = 1",
    "atexit": "import atexit\nclass A: pass\natexit.register(lambda: print(A, 'end'))",
    "thread": "import threading, time\nx = 1\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print(x))).start()",
    "hook": "import sys\nsys.excepthook = lambda k, e, t: print('hook', k, t.tb_lineno)\n1 / 0",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(2) from e",
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_under_python(end: str, tmp_path: Path) -> None:
    path = tmp_path / "end.py"
    path.write_text(ENDS[end])
    assert run(path) == plain(path)


def test_a_module_that_raises_shows_its_own_frames(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    raise ValueError('wanted')\nf()\n")
    status, out, err = run("-m", "bad", cwd=tmp_path)
    assert (status, out) == (1, "")
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert "gpumemx" not in err
    assert "runpy" not in err
    assert "ValueError: wanted" in err


def test_a_signal_ends_it_as_under_python(tmp_path: Path) -> None:
    path = tmp_path / "wait.py"
    path.write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "gpumemx", "run", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "gpumemx" not in err


def test_settings_reach_the_allocator(tmp_path: Path) -> None:
    path = tmp_path / "show.py"
    path.write_text(
        "import gpumemx\nprint([str(s) for s in gpumemx.settings() if s.source != 'default'])\n"
    )
    status, out, err = run(
        "--set",
        "cap:2GiB",
        "--conf=slack:0.5,price:3",
        "--set=price:4",
        path,
        GPUMEMX_CONF="slack:1",
    )
    assert (status, err) == (0, "")
    assert out == (
        "['cap:2GiB (install_allocator())', 'slack:0.5 (install_allocator())', "
        "'price:4 (install_allocator())']\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "error: there is no program to run"),
        (["-m"], "error: -m needs a module"),
        (["--sett", "a:b", "x.py"], "error: there is no option --sett"),
        (["--set"], "error: --set needs a value"),
        (["--set", "cap=2", "x.py"], "error: 'cap=2' is no setting; write KEY:VALUE"),
        (["--set", "capp:2", "x.py"], "there is no setting 'capp'; the nearest name is 'cap'"),
    ],
)
def test_a_wrong_option_is_status_2(arguments: list[str], text: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert text in err
    assert "Traceback" not in err


def test_a_program_that_is_not_there_is_status_2_as_under_python(tmp_path: Path) -> None:
    status, _, err = run("nowhere.py", cwd=tmp_path)
    assert (status, plain("nowhere.py", cwd=tmp_path)[0]) == (2, 2)
    assert err == (
        "gpumemx run: can't open file 'nowhere.py': [Errno 2] No such file or directory\n"
    )
    assert run("-m", "nowhere", cwd=tmp_path) == plain("-m", "nowhere", cwd=tmp_path)


def test_it_fails_where_gpumemx_cannot_be_installed(program: Path) -> None:
    status, out, err = run(program, PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
    assert (status, out) == (1, "")
    assert err.startswith("gpumemx run: gpumemx cannot be installed: torch runs on its ")


def test_disabled_runs_on_torchs_allocator(program: Path) -> None:
    status, out, err = run(program, GPUMEMX_DISABLE="1")
    assert (status, out.splitlines()[2]) == (0, "False")
    assert len(err.splitlines()) == 1


def test_help_is_status_0() -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert out.startswith("usage: gpumemx run ")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-m", "--no-python"])
def test_it_works_under_torchrun(how: str, program: Path) -> None:
    command = shutil.which("gpumemx", path=str(Path(sys.executable).parent))
    if how == "--no-python" and command is None:
        pytest.skip("the command gpumemx is not installed beside this Python")
    program.write_text(
        "import os, sys, gpumemx, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "line = f'rank {rank} {gpumemx.is_installed()} {sys.argv[1:]}\\n'\n"
        "os.write(1, line.encode())  # at once: both ranks write to one pipe\n"
        "dist.barrier(); dist.destroy_process_group()\n"
        "sys.exit(3 if rank == 1 and sys.argv[1:] == ['fail'] else 0)\n"
    )
    target = ["-m", "gpumemx"] if how == "-m" else ["--no-python", str(command)]
    for argument, status in (("ok", 0), ("fail", 1)):
        done = python(
            "-m",
            "torch.distributed.run",
            *("--nproc-per-node", 2, "--master-port", 29512 + os.getpid() % 1000),
            *(*target, "run", program, argument),
            OMP_NUM_THREADS="1",
        )
        assert done.returncode == status, done.stderr
        assert f"rank 0 True ['{argument}']" in done.stdout
        assert f"rank 1 True ['{argument}']" in done.stdout
    assert "exitcode  : 3" in done.stderr
