"""What passes between `launch(fn)` and its ranks, in a folder that is the launcher's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

CALL_FILE: Final = "call.pickle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a function ended on one rank.

    Attributes:
        value: What it returned, pickled; b"" if it did not return.
        error: What it raised, pickled; b"" if it cannot be or did not raise.
        traceback: The traceback as text, "" if it returned.
        time_ns: When it ended, on the host's monotonic clock.
    """

    value: bytes = b""
    error: bytes = b""
    traceback: str = ""
    time_ns: int


def outcome_file(folder: Path, rank: int) -> Path:
    """Return where a rank leaves its outcome."""
    return folder / f"outcome-{rank}.pickle"
