"""What this host says of itself and of the processes on it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil


def host_id() -> str:
    """Return what tells this host from others of its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux: the name must do
        return ""


def starter(variable: str) -> str:
    """Name the process that started the ranks of this host: the nearest ancestor that is no rank itself.

    Ranks may be wrapped in shells, which have their variables too; mpirun's daemon has not.
    """
    process = psutil.Process()
    for parent in process.parents():
        try:
            if variable not in parent.environ():
                return f"{parent.pid}@{socket.gethostname()}"
        except psutil.Error:  # another user's: then it is no rank of ours
            return f"{parent.pid}@{socket.gethostname()}"
    return f"{os.getppid()}@{socket.gethostname()}"
