"""The exit statuses of the command, and its error messages of one line."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

import click

from rankwise.errors import RankwiseError

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2


def print_error(error: RankwiseError) -> None:
    """Print an error."""
    click.echo(f"rankwise: {error}", err=True)


def fail(error: RankwiseError, status: int) -> NoReturn:
    """Print an error, and exit."""
    print_error(error)
    sys.exit(status)
