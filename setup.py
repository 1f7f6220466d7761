# SPDX-License-Identifier: BSD-3-Clause
"""Runs CMake for pip. Decides nothing: options, sources and flags are in CMakeLists.txt.

CMAKE_ARGS in the environment is added to the configure step
(CMAKE_ARGS=-DGPUMEMX_CUDA=OFF pip install .).
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        build = Path(self.build_temp).resolve() / "cmake"
        # pip may bring CMake and ninja in a new temporary folder each time: nothing of the last
        # configure may be remembered that points there.
        fresh = ["-U", "CMAKE_MAKE_PROGRAM", "-U", "pybind11_DIR"]
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        if ninja := shutil.which("ninja"):
            generator.append(f"-DCMAKE_MAKE_PROGRAM={ninja}")
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build)),
            *fresh,
            *generator,
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DGPUMEMX_BUILD_PYTHON=ON",
            "-DGPUMEMX_BUILD_LIBRARY=OFF",
            "-DGPUMEMX_BUILD_TESTS=OFF",
            "-DGPUMEMX_BUILD_BENCHMARKS=OFF",
            "-DGPUMEMX_WERROR=OFF",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # A module of an earlier configure must not be installed again.
        shutil.rmtree(build / "python", ignore_errors=True)
        for command in (
            configure,
            ["cmake", "--build", str(build), "--target", "gpumemx_python", "--parallel"],
        ):
            if subprocess.run(command).returncode != 0:
                raise SystemExit(f"gpumemx: this failed (see above): {shlex.join(command)}")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # _core, and the adapter for the torch that is there (csrc/bindings/torch).
        for module in (build / "python" / "gpumemx").glob("*.so"):
            shutil.copy2(module, target.parent / module.name)


setup(ext_modules=[Extension("gpumemx._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
