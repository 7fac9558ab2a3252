"""How the command says no: in a line, and with a status."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

import click

from rankwise.errors import RankwiseError

FOUND_A_FAULT: Final = 1
MISUSED: Final = 2


def say(error: RankwiseError) -> None:
    """Say what is wrong."""
    click.echo(f"rankwise: {error}", err=True)


def fail(error: RankwiseError, status: int) -> NoReturn:
    """Say what is wrong, and end."""
    say(error)
    sys.exit(status)
