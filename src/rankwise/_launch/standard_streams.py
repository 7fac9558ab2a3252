"""Standard streams that were closed when this process started, and the name of standard input as a script."""

from __future__ import annotations

import os
from typing import Final

# As for the interpreter.
STANDARD_INPUT: Final = "-"


def open_standard_streams() -> None:
    """Open the standard streams that `>&-` has closed, to /dev/null.

    Otherwise the next file that is opened would get the number of one, and output would be written to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # standard error
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
