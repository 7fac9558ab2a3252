"""Virtual environments and commands in them, for `tools.dist` and `tools.compat`. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Virtualenv:
    """A virtual environment in a folder: a new one, made by an interpreter, unless the one that is there is kept."""

    def __init__(self, folder: Path, *, interpreter: str = sys.executable, keep: bool = False) -> None:
        self.bin = folder / "bin"
        if not keep:
            run([interpreter, "-m", "venv", "--clear", str(folder)])

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    @property
    def site_packages(self) -> Path:
        (folder,) = self.bin.parent.glob("lib/python*/site-packages")
        return folder

    def install(self, *requirements: str, timeout: float = 3600) -> None:
        run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], timeout)


class CommandError(RuntimeError):
    """A command ended with another status than 0; the message has its output."""


def run(command: Sequence[str], timeout: float = 600, *, cwd: Path = ROOT) -> str:
    """Run a command that must succeed, and return its standard output and error."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if ended.returncode != 0:
        raise CommandError(f"{' '.join(command)} ended with status {ended.returncode}:\n{ended.stdout}")
    return ended.stdout


def environ() -> dict[str, str]:
    """Return this process's environment without variables that lead to another environment's packages."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
