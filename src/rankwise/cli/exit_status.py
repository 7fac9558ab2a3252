"""Errors of the command: one line, and an exit status."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

import click

from rankwise.errors import RankwiseError

FOUND_A_FAULT: Final = 1
MISUSED: Final = 2


def say(error: RankwiseError) -> None:
    """Print an error."""
    click.echo(f"rankwise: {error}", err=True)


def fail(error: RankwiseError, status: int) -> NoReturn:
    """Print an error, and exit."""
    say(error)
    sys.exit(status)
