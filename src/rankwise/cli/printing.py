"""What a command prints, and the error if that cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import click

from rankwise.errors import RankwiseError


def echo(text: str, *, file: Any = None, nl: bool = True) -> None:  # noqa: ANN401 - a text stream
    """Print a text to stdout, or to another stream.

    Raises:
        RankwiseError: The stream cannot be written to: its disk is full, for example.
    """
    with output_errors():
        click.echo(text, file=file, nl=nl)


@contextmanager
def output_errors(*, of_click: bool = False) -> Iterator[None]:
    """Raise what cannot be written in this block as an error of one line.

    Args:
        of_click: Only what click prints itself, such as the help; other errors are left.

    Raises:
        RankwiseError: stdout cannot be written to: its disk is full, for example.
    """
    try:
        yield
    except OSError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if error.errno == errno.EPIPE or (of_click and frame.f_globals["__name__"] != "click.utils"):
            raise  # the reader has seen enough, and click ends without a message; or it is no error of the output
        # What is still buffered would fail again at the end of the process, with a message of Python's.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RankwiseError(f"the output could not be written: {error.strerror}") from error
