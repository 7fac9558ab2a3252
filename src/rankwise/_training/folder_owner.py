"""The owner of a folder: the job that writes to it, known by a file with a heartbeat. There is no lock.

A job that finds the file of another one waits whether its heartbeat goes on. It takes the folder at once if the owner
was an earlier attempt of the same job, or a process of this host that has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from rankwise._net.host import host_id
from rankwise.errors import InvalidArgumentError

_NAME: Final = "owner"
_BEAT_SECONDS: Final = 2.0
# Not shorter: a thread that holds the GIL for long delays the heartbeat.
_SILENT_SECONDS: Final = 25.0
_POLL_SECONDS: Final = 0.5
# The entry is written in place, so that a disk that is full does not stop the heartbeat.
_ENTRY_BYTES: Final = 1000


class FolderOwner:
    """This job as the owner of a folder; on rank zero alone."""

    def __init__(self, folder: Path, *, job: str, attempt: int) -> None:
        """Prepare to take a folder.

        Args:
            folder: The folder, which exists when it is taken.
            job: The id of this job, the same after a restart; "" if it has none.
            attempt: How often this job was started again.
        """
        self._folder = folder
        self._file = folder / _NAME
        self._entry: dict[str, Any] = {"job": job, "attempt": attempt, "beat": 0}
        self._descriptor = -1
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take the folder, or check that this job still has it.

        Raises:
            InvalidArgumentError: Another job has it.
        """
        if self._thread is not None:
            if self._has_it():
                return
            if (found := _read(self._file)) is not None:
                raise _taken(self._folder, found)
            self.release()  # somebody has removed the file
        self._entry |= _process()
        while True:
            found = _read(self._file)
            if found is None:
                if self._place(os.link):
                    break
            elif self._may_follow(found) or not self._is_alive(found):
                self._place(os.replace)
                break
        self._ended.clear()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="rankwise-folder-owner")
        self._thread.start()

    def release(self) -> None:
        """Give the folder back."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        if self._has_it():
            self._file.unlink()
        os.close(self._descriptor)
        self._descriptor = -1

    def _may_follow(self, found: Mapping[str, Any]) -> bool:
        """Return whether the owner was this job, earlier, or a process that has ended."""
        own = self._entry
        if own["job"] and found.get("job") == own["job"] and found.get("attempt", 0) < own["attempt"]:
            return True
        if found.get("place") != own["place"]:
            return False
        is_own = (found.get("pid"), found.get("started")) == (own["pid"], own["started"])
        return is_own or not _is_running(found.get("pid"), found.get("started"))

    def _is_alive(self, found: Mapping[str, Any]) -> bool:
        """Wait whether the owner is silent.

        Raises:
            InvalidArgumentError: It is not.
        """
        deadline = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = _read(self._file)
            if now is None:
                return True  # it has given the folder back
            if now != found:
                raise _taken(self._folder, now)
        return False

    def _place(self, place: Callable[[Path, Path], None]) -> bool:
        """Make the file of this job; return whether it has its place."""
        new = self._file.with_name(f"{_NAME}.{uuid.uuid4().hex}")
        self._descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        try:
            self._write()
            place(new, self._file)
        except BaseException as error:
            os.close(self._descriptor)
            self._descriptor = -1
            if isinstance(error, FileExistsError):
                return False
            raise
        finally:
            new.unlink(missing_ok=True)
        return True

    def _write(self) -> None:
        os.pwrite(self._descriptor, json.dumps(self._entry).encode().ljust(_ENTRY_BYTES), 0)
        os.fsync(self._descriptor)

    def _has_it(self) -> bool:
        try:
            return os.path.samestat(self._file.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._entry["beat"] += 1
            with contextlib.suppress(OSError):  # as of a file system that is gone for a while
                self._write()


def _process() -> dict[str, object]:
    """Return what says which process this one is, and for whom its number is valid."""
    process = psutil.Process()
    namespace = ""
    with contextlib.suppress(OSError):  # not Linux
        namespace = str(Path("/proc/self/ns/pid").readlink())
    place = f"{host_id()} {namespace} {socket.gethostname()}"
    return {"host": socket.gethostname(), "place": place, "pid": process.pid, "started": process.create_time()}


def _is_running(pid: object, started: object) -> bool:
    try:
        process = psutil.Process(pid if isinstance(pid, int) else -1)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return False


def _read(file: Path) -> dict[str, Any] | None:
    """Return the entry in a file; {} while it is written, None if there is none."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _taken(folder: Path, entry: Mapping[str, Any]) -> InvalidArgumentError:
    job = f" of job {entry['job']}" if entry.get("job") else ""
    return InvalidArgumentError(
        f"folder={str(folder)!r} is in use: process {entry.get('pid')} on {entry.get('host')}{job} saves checkpoints "
        "there; end that job, or give each job a folder of its own"
    )
