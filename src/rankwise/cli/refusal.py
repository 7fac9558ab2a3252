"""How the command says no: in a line, and with a status."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

import click

from rankwise.errors import RankwiseError

FOUND_A_FAULT: Final = 1
MISUSED: Final = 2


def fail(error: RankwiseError, status: int) -> NoReturn:
    """Say what is wrong, and end."""
    click.echo(f"rankwise: {error}", err=True)
    sys.exit(status)
