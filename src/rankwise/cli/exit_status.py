"""The exit statuses of the command, and its error messages of one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import click

from rankwise.errors import InvalidArgumentError, RankwiseError

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2


def print_error(error: RankwiseError) -> None:
    """Print an error."""
    click.echo(f"rankwise: {error}", err=True)


def fail(error: RankwiseError, status: int) -> NoReturn:
    """Print an error, and exit."""
    print_error(error)
    sys.exit(status)


@contextmanager
def errors_exit() -> Iterator[None]:
    """Print an error that is raised in this block, and exit with its status."""
    try:
        yield
    except InvalidArgumentError as error:
        fail(error, EXIT_USAGE)
    except RankwiseError as error:
        fail(error, EXIT_ERROR)
