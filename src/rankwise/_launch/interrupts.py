"""KeyboardInterrupt in a launch that runs in another thread than the main one, which alone gets it from Python."""

from __future__ import annotations

import os


class Interrupts:
    """The interrupts of one launch, which its event loop waits for. A context manager that closes them."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def __enter__(self) -> Interrupts:  # noqa: PYI034 - nobody derives from it, and Self is not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """Return the descriptor that can be read while an interrupt was not taken."""
        return self._reader

    def interrupt(self) -> None:
        """Interrupt the launch, from any thread; the second time its ranks have no more time to end, as by Ctrl-C."""
        os.write(self._writer, b"\0")

    def take(self) -> None:
        """Raise the next one, in the thread of the launch.

        Raises:
            KeyboardInterrupt: Always.
        """
        os.read(self._reader, 1)
        raise KeyboardInterrupt
