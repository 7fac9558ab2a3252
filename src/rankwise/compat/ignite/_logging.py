"""Ignite's loggers: they write to stderr on rank zero, unless the program has configured them."""

from __future__ import annotations

import logging
import sys
from typing import Final

from rankwise.compat.ignite._identity import topology_number

_FORMAT: Final = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]  # can be subscripted from Python 3.11 on
    """A handler that looks up `sys.stderr` for each record, since it may be replaced after the handler is made."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_on_rank_zero(name: str, text: str, *args: object, level: int = logging.INFO) -> None:
    """Log a message on rank zero, with one of Ignite's loggers.

    Local.

    Args:
        name: The logger's name within `ignite.distributed`.
        text, args: As for `logging.Logger.log`.
        level: The level of the message.
    """
    if topology_number("rank") == 0:
        _logger(f"ignite.distributed.{name}").log(level, text, *args)


def _logger(name: str) -> logging.Logger:
    """Return a logger; a new one is configured as by Ignite's `setup_logger`."""
    known = isinstance(logging.root.manager.loggerDict.get(name), logging.Logger)
    logger = logging.getLogger(name)
    if not known:
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
