"""Killing processes so that none is left: grandchildren, those in a session of their own, those that are stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

import psutil

# The environment variable that all processes of one launcher have, with an id of the launcher as its value.
LAUNCH_ID: Final = "RANKWISE_LAUNCH"

_SET_DEATH_SIGNAL: Final = 1
_SET_SUBREAPER: Final = 36
# How long after the last of the others has ended the processes that remove shared memory may take for that: torch's
# waits 2 s first, for others that might come.
_REMOVAL_SECONDS: Final = 3.0
# SIGKILL has no effect on a process in an uninterruptible wait (a disk that does not answer) until that is over. So
# many seconds after the last of the others has ended, such processes are left.
_STUCK_SECONDS: Final = 4.0
_KILL_SECONDS: Final = 8.0
# The time to wait for another process that kills its descendants: longer than it waits itself.
SECONDS_TO_END: Final = 12.0
_PAUSE_SECONDS: Final = 0.005
# The errors of psutil where /proc is missing or empty, as in some containers.
_NO_PROC: Final = (OSError, IndexError)


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends, in place of process 1."""
    _prctl(_SET_SUBREAPER, 1)


def set_parent_death_signal() -> None:
    """Get SIGKILL when the parent process ends, for any reason."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def clear_parent_death_signal() -> None:
    """Get no signal any more when the parent process ends."""
    _prctl(_SET_DEATH_SIGNAL, 0)


def kill_descendants(known: Iterable[int] = (), left: Collection[int] = ()) -> list[int]:
    """Kill all descendants of this process, which adopts orphans, and reap them; return those that have not ended.

    Args:
        known: Those of them that lead process groups. Without /proc, only these groups can be found.
        left: Those that are not killed, as they have not ended after an earlier call, or will end by themselves.
    """

    def found() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if process.pid not in left]

    try:
        left = [process.pid for process in psutil.Process().children(recursive=True) if process.pid in left]
        return [*left, *_kill_all(found)]
    except (*_NO_PROC, psutil.NoSuchProcess):
        for pid in known:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return []


def shared_memory_removers() -> list[int]:
    """Return the descendants of this process that remove shared memory."""
    try:
        children = psutil.Process().children(recursive=True)
    except (*_NO_PROC, psutil.NoSuchProcess):
        return []
    return [process.pid for process in children if removes_shared_memory(process)]


def services(of_ranks: Collection[int]) -> list[int]:
    """Return the descendants of this process in sessions of their own, which ranks have started to outlive them.

    Args:
        of_ranks: The sessions of the ranks.
    """
    try:
        sessions, found = {os.getsid(0), *of_ranks}, psutil.Process().children(recursive=True)
    except (*_NO_PROC, psutil.NoSuchProcess):
        return []
    return [process.pid for process in found if _is_service(process, sessions)]


def kill_launch(launch_id: str, *, keeps_services: bool = False) -> None:
    """Kill all processes of one launcher, which have its id in their environments, except this one.

    The id alone does not count: a job that a rank has submitted inherits it, on this host or another. The process is
    also a descendant of this one, or in its cgroup and its step of a Slurm job.

    Args:
        launch_id: The id.
        keeps_services: Processes in sessions of their own are left.
    """

    def marked() -> list[psutil.Process]:
        descendants = {process.pid for process in psutil.Process().children(recursive=True)}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid == os.getpid() or process.environ().get(LAUNCH_ID) != launch_id:
                    continue
                is_kin = process.pid in descendants or _place(process) == own
                if is_kin and not (keeps_services and _is_service(process, session)):
                    found.append(process)
        return found

    with contextlib.suppress(*_NO_PROC, psutil.NoSuchProcess):
        own, session = _place(psutil.Process()), {os.getsid(0)}
        _kill_all(marked)


def _place(process: psutil.Process) -> tuple[str, ...]:
    """Return the cgroup of a process, and its step of a Slurm job."""
    try:
        cgroup = Path(f"/proc/{process.pid}/cgroup").read_text()
    except OSError:
        cgroup = ""
    environ = process.environ()
    return cgroup, *(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))


def _is_service(process: psutil.Process, sessions: Collection[int]) -> bool:
    """Return whether a process is in none of these sessions, and does not end by itself as soon as the others have."""
    try:
        return os.getsid(process.pid) not in sessions and not removes_shared_memory(process)
    except ProcessLookupError:
        return False


def _kill_all(find: Callable[[], list[psutil.Process]]) -> list[int]:
    """Kill processes, and return those that have not ended."""
    # Again and again: a process may fork between the moment when it is found and the moment when it is killed.
    start = changed = time.monotonic()
    before: list[int] = []
    while left := find():
        now = time.monotonic()
        if (pids := [process.pid for process in left]) != before:
            before, changed = pids, now
        if now - start > _KILL_SECONDS or now - changed > _STUCK_SECONDS:
            return pids
        for process in left:
            if now - changed > _REMOVAL_SECONDS or not removes_shared_memory(process):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        reap()
        time.sleep(_PAUSE_SECONDS)
    return []


def removes_shared_memory(process: psutil.Process) -> bool:
    """Return whether a process removes shared memory and semaphores that others have left, once all these have ended.

    They are the resource tracker of multiprocessing, and of joblib's copy of it, and the manager of torch. If they are
    killed with the others, nobody removes what these have made: it stays in memory until the host is started again.
    """
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return any("resource_tracker import main" in word for word in command) or (
        bool(command) and Path(command[0]).name == "torch_shm_manager"
    )


def wait_of(pid: int, proc: Path = Path("/proc")) -> str:
    """Return what a process waits for, as "state D, in nfs_wait_bit"; "" if it has ended, or there is no /proc."""
    try:
        # "7 (a name) D 1 ...": the name may contain anything.
        state = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        channel = (proc / str(pid) / "wchan").read_text(errors="replace").strip()
    except (OSError, IndexError):
        return ""
    return f"state {state}, in {channel if channel not in {'', '0'} else 'a place of the kernel that it does not show'}"


def reap() -> list[tuple[int, int]]:
    """Reap the children that have ended, and return their process numbers and exit codes."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    return ended


def _prctl(option: int, value: int) -> None:
    """Call prctl on Linux. Elsewhere only the fork server's own children are known to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
