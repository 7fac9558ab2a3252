"""Builds the simulated device in a folder: python -m tests.accelerator.build FOLDER.

With that folder in PYTHONPATH, every process of torch has the device. It is built again when its sources or torch
change. Without a C++ compiler this fails.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("simdev")
KEY_FILE = "key"
# The module is built beside its sources; torch loads it by its entry point.
SETUP = """
from concurrent.futures import ThreadPoolExecutor
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension


class Build(BuildExtension):
    def build_extensions(self):
        compile_all = self.compiler.compile

        def compile_at_once(sources, **settings):
            with ThreadPoolExecutor() as pool:
                return sum(pool.map(lambda source: compile_all([source], **settings), sources), [])

        self.compiler.compile = compile_at_once
        super().build_extensions()


sources = ["simdev/device.cpp", "simdev/communication.cpp"]
setup(
    name="simdev",
    version="0",
    packages=["simdev"],
    ext_modules=[CppExtension("simdev._simccl", sources, extra_compile_args=["-O0", "-std=c++20", "-w"])],
    cmdclass={"build_ext": Build.with_options(use_ninja=False)},
    entry_points={"torch.backends": ["simdev = simdev:load"]},
)
"""


def build(folder: Path) -> None:
    """Build the device, if the folder does not have it."""
    key = _key()
    if (folder / KEY_FILE).is_file() and (folder / KEY_FILE).read_text() == key:
        return
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "simdev"
    package.mkdir(parents=True)
    for source in SOURCES.iterdir():
        if source.suffix in {".cpp", ".h"}:
            shutil.copy(source, package)
    shutil.copy(SOURCES / "module.py", package / "__init__.py")
    (folder / "setup.py").write_text(SETUP)
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env=environ, check=True)
    shutil.rmtree(folder / "build")
    (folder / KEY_FILE).write_text(key)


def _key() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {SETUP}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes() if source.is_file() else b"")
    return digest.hexdigest()


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute())
