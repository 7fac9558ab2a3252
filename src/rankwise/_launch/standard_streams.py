"""The standard streams of processes whose own may be closed."""

from __future__ import annotations

import os


def open_standard_streams() -> None:
    """Open what was closed by `>&-`, lest the next thing that is opened takes its number, and is written to."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - standard error
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
