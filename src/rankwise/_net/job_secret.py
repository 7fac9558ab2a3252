"""The secret of a job, by which its processes on several hosts prove to each other that they belong to it.

Decided here: where it comes from, and how codes are computed with it. Which messages carry a code is decided where
they are sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rankwise.errors import LauncherEnvironmentError

# Set by launchers that start the other hosts, or by the user, for launchers and ranks alike.
SECRET: Final = "RANKWISE_SECRET"  # noqa: S105 - the name of a variable
# The path of a file with a secret, on a file system that all hosts share; without it, the default.
SECRET_FILE: Final = "RANKWISE_SECRET_FILE"  # noqa: S105 - likewise
DEFAULT_FILE: Final = ".rankwise/secret"

# The warning where several hosts have none.
NO_SECRET: Final = (
    "the hosts of this job have no secret, so every process that reaches their ports can take part in it and run code; "
    f"set {SECRET}, or make a file that all hosts share: "
    f"(umask 077; mkdir -p ~/.rankwise; openssl rand -hex 32 > ~/{DEFAULT_FILE})"
)

CODE_BYTES: Final = 32
_SHORTEST: Final = 16
_LONGEST: Final = 4096
_BY_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class JobSecret:
    """A secret, which is never shown."""

    __slots__ = ("_key", "source")

    def __init__(self, text: str, source: str) -> None:
        """Keep the secret.

        Args:
            text: The secret.
            source: Where it comes from, for messages.

        Raises:
            LauncherEnvironmentError: It is too short to be one.
        """
        if len(text) < _SHORTEST:
            raise LauncherEnvironmentError(
                f"the secret in {source} has {len(text)} characters, and {_SHORTEST} are the least; make one with "
                "`openssl rand -hex 32`"
            )
        self._key = text.encode(errors="surrogateescape")
        self.source = source

    def __repr__(self) -> str:
        return f"<JobSecret from {self.source}>"

    def code(self, purpose: str, *parts: bytes) -> bytes:
        """Return the code (HMAC) of a message, which consists of parts, for a purpose."""
        return code(self._key, purpose, *parts)


def code(key: bytes, purpose: str, *parts: bytes) -> bytes:
    """Return the HMAC of a message. Other parts, or the same bytes divided otherwise, have another one."""
    message = b"".join(len(part).to_bytes(8, "big") + part for part in (purpose.encode(), *parts))
    return hmac.new(key, message, hashlib.sha256).digest()


def new_secret() -> str:
    """Return a new random secret."""
    return secrets.token_hex(32)


def find_secret(environ: Mapping[str, str]) -> JobSecret | None:
    """Return the secret of this job: that of the variable, else that of the file; None if there is neither.

    Raises:
        LauncherEnvironmentError: It is too short, or the file cannot be read or is not this user's alone.
    """
    if text := environ.get(SECRET, ""):
        return JobSecret(text, SECRET)
    named = environ.get(SECRET_FILE, "")
    path = Path(named) if named else Path(environ.get("HOME", "/nonexistent")) / DEFAULT_FILE
    remedy = f"correct it, or set {SECRET} to the same secret on all hosts"
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_LONGEST)
    except OSError as error:
        if not named and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return None
        raise LauncherEnvironmentError(
            f"the secret of jobs in {path} cannot be read: {error.strerror}; {remedy}"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & _BY_OTHERS:
        raise LauncherEnvironmentError(
            f"the secret of jobs in {path} is not private: its owner is user {status.st_uid} and its mode "
            f"{stat.S_IMODE(status.st_mode):o}, and it has to be yours with mode 600: "
            f"`chmod 600 {path}`, and make another secret if it may have been read"
        )
    return JobSecret(content.decode(errors="surrogateescape").strip(), str(path))
