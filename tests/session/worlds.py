"""Worlds for tests that look at joining itself: programs in new processes, each with an environment of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")


def clean_environ(**variables: str) -> dict[str, str]:
    """Return this process's environment without anything of a launcher's, and with these variables."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return own | {"OMP_NUM_THREADS": "1"} | variables


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def run_ranks(
    program: str, environs: Sequence[dict[str, str]], *args: str, seconds: float = 40.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program of the folder `programs` once for each environment, all at the same time."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), *args],
            env=clean_environ(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environ in environs
    ]
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=seconds)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return ended


def plain(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """Return the variables that somebody sets by hand."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }
