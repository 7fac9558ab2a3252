"""Ranks without a terminal: `breakpoint()` and reads of standard input are errors that say so."""

from __future__ import annotations

import io
import sys
from typing import Any, Final, NoReturn

from rankwise.errors import LaunchError

# The value of PYTHONBREAKPOINT that makes `breakpoint()` such an error.
BREAKPOINT_HOOK: Final = f"{__name__}.refuse_breakpoint"


def refuse_breakpoint(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - as of the built-in hook
    """Raise an error, as the hook of `breakpoint()`.

    Raises:
        LaunchError: Always.
    """
    raise LaunchError(
        "breakpoint() needs a terminal, and a rank that another engine runs has none: stop the rank under `rankwise "
        "launch`, or set PYTHONBREAKPOINT to a debugger that listens on a port"
    )


def refuse_input() -> None:
    """Make reads of `sys.stdin` an error: this rank has no standard input."""
    sys.stdin = _NoInput()


class _NoInput(io.TextIOBase):
    """A standard input that cannot be read. It has no descriptor, and is no terminal."""

    def read(self, _size: int | None = -1, /) -> NoReturn:
        _refuse()

    def readline(self, _size: int = -1, /) -> NoReturn:  # type: ignore[override]  # it never returns
        _refuse()


def _refuse() -> NoReturn:
    raise LaunchError(
        "this rank has no standard input: another engine runs it; pass what it should read as an argument, or in a file"
    )
