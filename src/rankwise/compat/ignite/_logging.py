"""Ignite's loggers: on rank zero they show themselves, unless the program has set them up."""

from __future__ import annotations

import logging
import sys
from typing import Final

from rankwise.compat.ignite._identity import session_or_none

_FORMAT: Final = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]  # can be subscripted from Python 3.11 on
    """Writes to what `sys.stderr` is when something is logged, which may have been replaced since it was made."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_on_rank_zero(name: str, text: str, *args: object, level: int = logging.INFO) -> None:
    """Log on rank zero, through the logger that Ignite has for it.

    Local.

    Args:
        name: The logger's name within `ignite.distributed`.
        text, args: As for `logging.Logger.log`.
        level: How important it is.
    """
    session = session_or_none()
    if session is None or session.rank == 0:
        _logger(f"ignite.distributed.{name}").log(level, text, *args)


def _logger(name: str) -> logging.Logger:
    """Return a logger; one that nobody has asked for before is set up as Ignite's `setup_logger` does it."""
    known = isinstance(logging.root.manager.loggerDict.get(name), logging.Logger)
    logger = logging.getLogger(name)
    if not known:
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
