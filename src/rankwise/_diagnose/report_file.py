"""A report as a new file, with its host, its lowest rank and the time in the name."""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path


def write_report(folder: str, text: str, rank: int, *, kind: str = "hang") -> str:
    """Write a report into a folder, which is made if it does not exist, and return a line with the path, or the error.

    Args:
        folder: The folder.
        text: The report.
        rank: Its lowest rank on this host.
        kind: The beginning of the name.
    """
    # The end of the name cannot be foretold, by another user who may write to the folder: nor is a link followed.
    end = f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}"
    name = f"{kind}-{socket.gethostname()}-rank{rank}-{end}.txt"
    path = Path(folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(f"{text}\n")
    except OSError as error:
        return f"this report could not be written to {path}: {error.strerror}"
    return f"this report is in {path}"
