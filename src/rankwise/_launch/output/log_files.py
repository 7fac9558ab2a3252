"""The log files of ranks, in the folders of torchrun: one for each stream of each rank, in each attempt.

A stream that is redirected is the file itself, to which the rank writes. A stream that is teed is a pipe: the launcher
writes what it reads there to the file, with times if they are wanted, and shows it. `latest` is a link to the folder of
the newest launch, which its launcher locks, so that a reader knows when it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from rankwise._arguments import integer
from rankwise._launch.output.line_prefix import line_time
from rankwise._launch.output.stream_writer import StreamWriter
from rankwise.errors import InvalidArgumentError, LaunchError, shown

# 1 for standard output, 2 for standard error, 3 for both, and 0 for none: as torch's `Std`. By local rank, or for all.
Streams: TypeAlias = int | Mapping[int, int]

_BOTH: Final = 3
LOG_NAMES: Final = {1: "stdout.log", 2: "stderr.log"}
LATEST: Final = "latest"


@dataclass(slots=True)
class LogFile:
    """The log of one stream of a rank.

    Attributes:
        descriptor: The open file.
        is_teed: The launcher writes it, and shows the output too.
        writer: Writes what the launcher adds.
        on_failure: Called with a message when the file can no longer be written.
        has_times: Each line begins with its time.
        has_failed: `on_failure` was called.
    """

    descriptor: int
    is_teed: bool
    writer: StreamWriter
    on_failure: Callable[[str], None]
    has_times: bool = False
    has_failed: bool = False
    _is_in_line: bool = False

    def write(self, data: bytes) -> None:
        """Append data. A failure is reported once; the rank continues."""
        if self.has_times and data:
            data = self._with_times(data)
        if not self.writer.write(data) and not self.has_failed:
            self.has_failed = True
            self.on_failure(self.writer.failure)

    def _with_times(self, data: bytes) -> bytes:
        time, is_in_line = f"{line_time()} ".encode(), self._is_in_line
        self._is_in_line = not data.endswith(b"\n")
        return (b"" if is_in_line else time) + data[:-1].replace(b"\n", b"\n" + time) + data[-1:]


class LogFolder:
    """The folder of a launch, with those of its attempts and ranks.

    `LOG_DIR/RUN_ID_RANDOM/attempt_N/LOCAL_RANK/stdout.log`, and `stderr.log`, as with torchrun.
    """

    def __init__(
        self, folder: str | None, *, redirects: Streams | None, tee: Streams | None, has_times: bool = False
    ) -> None:
        """Prepare; nothing is created yet.

        Args:
            folder: The folder for all launches; None for a temporary one, "/dev/null" for no files.
            redirects: The streams that are written to files only.
            tee: The streams that are written to files and shown. If neither is given, a folder gets all streams.
            has_times: Each line of the latter begins with its time.
        """
        if folder == os.devnull:  # as with torchrun: no files
            folder, redirects, tee = None, 0, 0
        if folder is not None and redirects is None and tee is None:
            tee = _BOTH
        self._redirects: Streams = redirects or 0
        self._tee: Streams = tee or 0
        self._base = folder
        self._run: Path | None = None
        self._attempt: Path | None = None
        self._files: list[LogFile] = []
        self._has_times = has_times
        self._lock: int | None = None
        self._is_used = folder is not None or bool(self._redirects or self._tee)

    def create(self) -> str:
        """Create the base folder, if there are log files, and return a message if it is a temporary one.

        Raises:
            LaunchError: It cannot be created, or nothing can be created in it.
        """
        if not self._is_used:
            return ""
        message = ""
        with self._explained():
            if self._base is None:
                self._base = tempfile.mkdtemp(prefix="rankwise_")
                message = f"rankwise: log files are in {self._base}"
            base = Path(os.path.abspath(self._base))  # noqa: PTH100 - symbolic links are kept
            base.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=base).close()
            self._base = str(base)
        return message

    def begin_attempt(self, environ: Mapping[str, str]) -> None:
        """Create the folder of an attempt.

        Args:
            environ: The environment of one of its ranks, which has the run and the attempt.

        Raises:
            LaunchError: It cannot be created.
        """
        if not self._is_used:
            return
        with self._explained():
            if self._run is None:
                name = environ["TORCHELASTIC_RUN_ID"].replace(os.sep, "_")
                self._run = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=self._base))
                self._lock = _locked(self._run)
                _link_latest(self._run)
            self._attempt = self._run / f"attempt_{environ['TORCHELASTIC_RESTART_COUNT']}"
            self._attempt.mkdir(exist_ok=True)

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables of a rank: the file in which `torch.distributed.elastic`'s `record` writes its error."""
        if self._attempt is None:
            return {}
        folder = self._attempt / str(local_rank)
        with self._explained():
            folder.mkdir(exist_ok=True)
        return {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}

    def open(
        self, local_rank: int, stream: int, *, on_writable: Callable[[], None], on_failure: Callable[[str], None]
    ) -> LogFile | None:
        """Open the log of a stream; None if it has none.

        Args:
            local_rank: The rank.
            stream: 1 for standard output, 2 for standard error.
            on_writable: Called, from any thread, when the file accepts data again.
            on_failure: Called with a message when it can no longer be written.

        Raises:
            LaunchError: It cannot be created.
        """
        is_teed = bool(_streams_of(self._tee, local_rank) & stream)
        if self._attempt is None or not (is_teed or _streams_of(self._redirects, local_rank) & stream):
            return None
        path = self._attempt / str(local_rank) / LOG_NAMES[stream]
        with self._explained():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        writer = StreamWriter(descriptor, f"log file {path}", on_writable=on_writable)
        self._files.append(LogFile(descriptor, is_teed, writer, on_failure, has_times=is_teed and self._has_times))
        return self._files[-1]

    def close(self, seconds: float) -> list[str]:
        """Write and close all files, and return a message for each that is incomplete, or whose disk is full."""
        files, self._files = self._files, []
        lost = []
        for file in files:
            lost += [text for text in [file.writer.drain(seconds)] if text]
            os.close(file.descriptor)
        if files and not lost and self._run is not None and _is_full(self._run):
            lost.append(f"the disk of log_dir={self._run} is full: log files may be incomplete")
        return lost

    def end(self) -> None:
        """Let readers know that the launch has ended."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LaunchError(
                f"log_dir={shown(self._base)}: {error.filename} cannot be created or written: {error.strerror}"
            ) from error


def check_streams(value: object, name: str) -> None:
    """Check a choice of streams.

    Raises:
        InvalidArgumentError: It is neither 0 to 3, nor a mapping of local ranks to these.
    """
    chosen = list(value.values()) if isinstance(value, Mapping) else [value]
    ranks = list(value) if isinstance(value, Mapping) else []
    if not all(integer(one) in range(_BOTH + 1) for one in chosen) or not all((integer(r) or 0) >= 0 for r in ranks):
        raise InvalidArgumentError(
            f"{name}={shown(value)} is not a choice of streams: 1 for stdout, 2 for stderr, 3 for both, 0 for none, "
            "for all ranks, or by local rank, such as {0: 3, 1: 2}"
        )


def parse_streams(text: str, name: str) -> Streams:
    """Return the choice of streams in a text such as "3" or "0:1,1:2", as torchrun reads it.

    Raises:
        InvalidArgumentError: It is none.
    """
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        if len(pairs) == 1 and not pairs[0][1]:
            value: Streams = int(text)
        else:
            value = {int(rank): int(streams) for rank, _, streams in pairs}
    except ValueError:
        value = -1
    try:
        check_streams(value, name)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"{text!r} is neither 0, 1 (stdout), 2 (stderr) nor 3 (both), nor LOCAL_RANK:STREAMS,..., such as 0:3,1:2"
        ) from None
    return value


def named_ranks(value: Streams | None) -> list[int]:
    """Return the local ranks that a choice names."""
    return list(value) if isinstance(value, Mapping) else []


def _streams_of(value: Streams, local_rank: int) -> int:
    return value.get(local_rank, 0) if isinstance(value, Mapping) else value


def has_ended(run: Path) -> bool:
    """Return whether the launch with this folder has ended."""
    descriptor = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    finally:
        os.close(descriptor)
    return True


def _locked(run: Path) -> int:
    """Lock a folder for as long as this process lives, and return the descriptor."""
    descriptor = os.open(run, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _link_latest(run: Path) -> None:
    """Let the link `latest` beside a folder name it."""
    with contextlib.suppress(OSError):  # a file system without links
        new = run / LATEST
        new.symlink_to(run.name)
        new.replace(run.parent / LATEST)


def _is_full(folder: Path) -> bool:
    try:
        return os.statvfs(folder).f_bavail == 0
    except OSError:
        return False
