"""The processes of this user, as /proc shows them. Processes of other users are not read."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankwise._rank_files import status_field
from rankwise.errors import RankwiseError

_PROC: Final = Path("/proc")
# Windows has no sysconf, and no /proc.
_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0
_PAGE: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
# The errors of a process that ends while it is read, or that the kernel does not let this user read.
_UNREADABLE: Final = (OSError, ValueError, IndexError)
_COMMUNICATOR: Final = re.compile(r"/\w*ccl[^/\n]*\.so\b")
# Files that an interpreter maps, whatever its name is.
_OF_PYTHON: Final = ("/libpython", "/lib-dynload/", "/libtorch_python")


class DiagnosisError(RankwiseError, RuntimeError):
    """A job cannot be looked at: it was not found, or there is no /proc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process at one moment.

    Attributes:
        pid: The process id.
        parent: That of its parent.
        state: The letter of the kernel: R running, S waiting, D in an uninterruptible wait, T stopped, Z ended.
        cpu_seconds: CPU time that all of its threads have used.
        started: When it was started, in seconds after the boot of the host.
        memory: Resident memory, in bytes.
    """

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    started: float
    memory: int

    @property
    def age(self) -> float:
        """The seconds since it was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started


def own_processes() -> dict[int, Process]:
    """Return the processes of this user, by process id.

    Raises:
        DiagnosisError: There is no /proc of Linux.
    """
    if sys.platform != "linux" or not (_PROC / "self" / "stat").exists():
        raise DiagnosisError(
            f"the processes of a job are found in /proc of Linux, which is missing here ({sys.platform}); mount it, "
            "or run the command on the host of the job"
        )
    return {process.pid: process for process in _read_all()}


def _read_all() -> Iterator[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                if entry.stat().st_uid != os.getuid():
                    continue
            except OSError:
                continue
            process = read_process(int(entry.name))
            if process is not None:
                yield process


def read_process(pid: int) -> Process | None:
    """Return a process; None if it does not exist."""
    try:
        # "7 (a name) S 1 ...": the name may contain anything.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return Process(
            pid=pid,
            parent=int(fields[1]),
            state=fields[0],
            cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
            started=int(fields[19]) / _TICKS,
            memory=int(fields[21]) * _PAGE,
        )
    except _UNREADABLE:
        return None


def environ_of(pid: int) -> Mapping[str, str]:
    """Return the variables that a process was started with; none if they cannot be read."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _equals, value in pairs}


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it cannot be read."""
    try:
        return [os.fsdecode(word) for word in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0") if word]
    except OSError:
        return []


def is_python(pid: int) -> bool:
    """Return whether a process is a Python interpreter, by its name, or by the libraries of an embedded one."""
    try:
        if (_PROC / str(pid) / "exe").readlink().name.startswith(("python", "pypy")):
            return True
        mappings = (_PROC / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return False
    return any(part in mappings for part in _OF_PYTHON)


def has_communicator(pid: int) -> bool:
    """Return whether a process has loaded a library for collectives of accelerators, such as NCCL, RCCL or oneCCL."""
    try:
        mappings = (_PROC / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return False
    return _COMMUNICATOR.search(mappings) is not None


def wait_channel(pid: int) -> str:
    """Return the function of the kernel that a process waits in; "" if it runs, or the kernel does not show it."""
    try:
        name = (_PROC / str(pid) / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def main_thread_times(pid: int) -> tuple[float, float]:
    """Return for how many seconds a main thread has run, and for how many it has waited for a core."""
    try:
        run, delay, _slices = (_PROC / str(pid) / "task" / str(pid) / "schedstat").read_text().split()
        return int(run) / 1e9, int(delay) / 1e9
    except _UNREADABLE:
        return 0.0, 0.0


def allowed_cores(pid: int) -> str:
    """Return the cores that a process may run on, as "0-3"; "" if that is not known."""
    return status_field(pid, "Cpus_allowed_list")
