"""The folder of a user's launch servers: a socket for each. No other user may enter it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rankwise.errors import LaunchError

_SUFFIX: Final = ".sock"
_LOCK: Final = "lock"
# The longest path that the address of a socket can hold.
_MAX_PATH: Final = 107
_NAME_BYTES: Final = 32
# The process at the other end of a connection: its id, user and group.
_CREDENTIALS: Final = struct.Struct("3i")


class ServerFolder:
    """The folder.

    Attributes:
        path: Its path.
    """

    def __init__(self, runtime_folder: str | None) -> None:
        """Make the folder, unless it exists.

        Args:
            runtime_folder: The folder for a user's sockets (XDG_RUNTIME_DIR); None for one in the temporary folder.

        Raises:
            LaunchError: It cannot be made, or belongs to someone else.
        """
        self.path = _choose(runtime_folder)
        try:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            status = self.path.lstat()
        except OSError as error:
            raise LaunchError(
                f"launch servers need a folder for their sockets, and {self.path} cannot be made: {error.strerror}"
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise LaunchError(
                f"{self.path} is not a folder that only this user may enter (mode 0700): launch servers are not used "
                "there, since others could answer in place of them; remove it"
            )

    def socket_path(self, digest: str) -> Path:
        """Return the path of the socket of a server."""
        return self.path / f"{digest}{_SUFFIX}"

    def sockets(self) -> list[Path]:
        """Return the paths of all sockets, those of servers that have ended included."""
        return sorted(self.path.glob(f"*{_SUFFIX}"))

    def listen(self, path: Path) -> socket.socket:
        """Return a socket that listens there; what a server that has ended has left is removed."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        return listener


def connect(path: Path) -> socket.socket | None:
    """Return a connection to the server of this user that listens there; None if there is none.

    Raises:
        LaunchError: Another user listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    if peer_user(connection) != os.geteuid():
        connection.close()
        raise LaunchError(f"another user listens at {path}")
    return connection


def remove_socket(path: Path, inode: int) -> None:
    """Remove a socket, unless another server has taken its place."""
    with contextlib.suppress(OSError), locked(path.parent):
        if path.stat().st_ino == inode:
            path.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from adding and removing sockets."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def peer_user(connection: socket.socket) -> int:
    """Return the id of the user at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user


def _choose(runtime_folder: str | None) -> Path:
    if runtime_folder and os.path.isabs(runtime_folder):  # noqa: PTH117 - a string of the environment
        path = Path(runtime_folder) / "rankwise"
        if path.parent.is_dir() and _fits(path):
            return path
    path = Path(tempfile.gettempdir()) / f"rankwise-{os.geteuid()}"
    if not _fits(path):
        raise LaunchError(f"launch servers need sockets in {path}, whose path is too long: set TMPDIR to a shorter one")
    return path


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + _NAME_BYTES <= _MAX_PATH
