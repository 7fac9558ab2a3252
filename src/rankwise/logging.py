"""Logging of a program on several ranks: each line with its rank, most lines of rank zero alone.

import rankwise.logging

rankwise.logging.configure()
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Final

from rankwise._launch.output.line_prefix import HAS_PREFIX
from rankwise._session.environ import process_variables
from rankwise._session.getters import get_rank
from rankwise.errors import InvalidArgumentError, shown

__all__ = ["configure"]

_FORMAT: Final = "%(levelname)s %(name)s: %(message)s"
_FILE_FORMAT: Final = "%(asctime)s [%(rank)s] %(levelname)s %(name)s: %(message)s"


def configure(
    level: int | str = "INFO", *, others: int | str = "WARNING", folder: str | os.PathLike[str] | None = None
) -> None:
    """Log to standard error, with the rank in front: from `level` on rank zero, and from `others` on the other ranks.

    Local. Before or after `init()`, and again: it replaces what it has configured before, and no handlers of other
    code. There is no rank in front where `rankwise launch` puts one there itself.

    Args:
        level: The lowest level that rank zero shows, a number or a name.
        others: The lowest level that other ranks show.
        folder: A folder for a file of each rank, `rank_N.log`, with all records from the lower one of these levels, and
            the time. It is made if it does not exist; records are appended. The rank is that of this call.

    Raises:
        InvalidArgumentError: There is no such level, or `folder` is not a path.
        OSError: The file of this rank cannot be opened.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> import logging
        >>> configure()
        >>> logging.getLogger("train").info("loss %.2f", 0.25)  # [0] INFO train: loss 0.25
    """
    levels = _level(level, "level"), _level(others, "others")
    ranked = _Ranked(*levels)
    shows_rank = HAS_PREFIX not in process_variables()
    handlers: list[logging.Handler] = [_StreamHandler(sys.stderr)]
    handlers[0].setFormatter(logging.Formatter(f"[%(rank)s] {_FORMAT}" if shows_rank else _FORMAT))
    handlers[0].addFilter(ranked)
    if folder is not None:
        file = _FileHandler(_file(folder, ranked.rank), encoding="utf-8", delay=False)
        file.setFormatter(logging.Formatter(_FILE_FORMAT))
        file.setLevel(min(levels))
        file.addFilter(ranked.add_rank)
        handlers.append(file)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, (_StreamHandler, _FileHandler))]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(min(levels))


class _StreamHandler(logging.StreamHandler):  # type: ignore[type-arg]  # of any stream
    """The handler of `configure`, for standard error."""


class _FileHandler(logging.FileHandler):
    """The handler of `configure`, for the file of a rank."""


class _Ranked(logging.Filter):
    """Gives records their rank, and lets those pass that this rank shows."""

    def __init__(self, level: int, others: int) -> None:
        super().__init__()
        self._level, self._others = level, others
        self._asking = threading.local()
        self.rank = get_rank()

    def filter(self, record: logging.LogRecord) -> bool:
        self.add_rank(record)
        return record.levelno >= (self._others if self.rank else self._level)

    def add_rank(self, record: logging.LogRecord) -> bool:
        """Give a record its rank."""
        # `init()` may give this process another rank. To find out about it may log, and would lead here again.
        if not getattr(self._asking, "now", False):
            self._asking.now = True
            try:
                self.rank = get_rank()
            finally:
                self._asking.now = False
        record.rank = self.rank
        return True


def _level(value: int | str, name: str) -> int:
    found = logging.getLevelName(value.upper()) if isinstance(value, str) else value
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    raise InvalidArgumentError(f"{name}={shown(value)} is not a level of logging, such as 'INFO' or logging.INFO")


def _file(folder: str | os.PathLike[str], rank: int) -> Path:
    try:
        path = Path(folder)
    except TypeError:
        raise InvalidArgumentError(f"folder={shown(folder)} is not a path") from None
    path.mkdir(parents=True, exist_ok=True)
    return path / f"rank_{rank}.log"
