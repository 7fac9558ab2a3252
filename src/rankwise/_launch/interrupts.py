"""KeyboardInterrupt in a launch that runs in another thread than the main one, which alone gets it from Python."""

from __future__ import annotations

import contextlib
import socket
from typing import Self


class Interrupts:
    """The interrupts of one launch, which its event loop waits for. A context manager that closes them."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor that can be read while an interrupt was not taken."""
        return self._reader.fileno()

    def interrupt(self) -> None:
        """Interrupt the launch, from any thread; the second time its ranks have no more time to end, as by Ctrl-C."""
        with contextlib.suppress(OSError):  # the launch has ended just now
            self._writer.send(b"\0")

    def take(self) -> None:
        """Raise the next one, in the thread of the launch.

        Raises:
            KeyboardInterrupt: Always.
        """
        self._reader.recv(1)
        raise KeyboardInterrupt
