"""What to start: checked before anything is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankwise.errors import InvalidArgumentError

# More processes than this for each core is a typing error: every one of them loads torch.
_PER_CORE: Final = 16
_AT_LEAST: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ranks of one host.

    Attributes:
        nproc: How many.
        command: The program and its arguments, the same for every rank.
        environ: What each rank's environment has besides the launcher's own and the rank's variables.
    """

    nproc: int
    command: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()


def check_nproc(nproc: int) -> None:
    """Check a number of processes to start here.

    Raises:
        InvalidArgumentError: It is below 1, or beyond what this host could be meant to run.
    """
    cores = os.cpu_count() or 1
    most = max(_AT_LEAST, _PER_CORE * cores)
    if isinstance(nproc, bool) or not isinstance(nproc, int) or not 1 <= nproc <= most:
        raise InvalidArgumentError(
            f"nproc={nproc!r} is not a number of processes from 1 to {most} (this host has {cores} cores)"
        )


def script_command(script: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs a script as `python script.py` does.

    Raises:
        InvalidArgumentError: There is no such script.
    """
    path = Path(script)
    if not path.exists():
        raise InvalidArgumentError(f"script {script!r} does not exist (looked in {Path.cwd()})")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise InvalidArgumentError(f"script {script!r} is a directory, and has no __main__.py")
    return (sys.executable, "-u", script, *args)


def module_command(module: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs a module as `python -m` does."""
    return (sys.executable, "-u", "-m", module, *args)
