"""The standard streams of a launcher, or their replacements as in a notebook, and what is on their last lines.

A launcher has one. Launches that run beside each other in a process share it: each has a thread, and a console.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from rankwise._launch.output.stream_writer import StreamWriter, TextStreamWriter, Writer
from rankwise._launch.output.terminal_line import TerminalLine, fitted


class Screen:
    """The streams that output is shown on.

    Attributes:
        lock: Held while a piece of output is shown, so that the pieces of several launches stay whole.
        unfinished: For each writer, the output whose line was shown last, if that line has no end yet.
        is_inherited: A rank has inherited a descriptor: what is on the last line is not known.
        has_output: Ranks have printed something.
        on_writable: Each is called, from any thread, when a writer that was full accepts data again.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.unfinished: dict[Writer, object] = {}
        self.is_inherited = False
        self.has_output = False
        self.on_writable: list[Callable[[], None]] = []
        self._lines: dict[Writer, TerminalLine] = {}
        self._writers: dict[object, Writer] = {}

    def show_status(self, text: str, *, last: bool = False, rank: int | None = None) -> None:
        """Show a line on a terminal; unless it is the last one, other output replaces it.

        Args:
            text: The line.
            last: It stays.
            rank: With a number below zero, other output is shown above the line, in place of the bars of ranks.
        """
        writer = self.writer(sys.stderr) if is_terminal(sys.stderr) else None
        if writer is not None:
            with self.lock:
                line = self.last_line(writer)
                shown = fitted(b"", text.encode(), sys.stderr.fileno())  # of two lines, the first would stay
                writer.write(line.clear() + f"{text}\n".encode() if last else line.show(shown, rank))

    def clear_status(self) -> None:
        """Erase the line of `show_status`, if it is there."""
        with self.lock:
            for writer, line in self._lines.items():
                if line.text and (line.rank is None or line.rank < 0):
                    writer.write(line.clear())

    def print_message(self, text: str) -> None:
        """Show a message of the launcher on standard error."""
        writer = self.writer(sys.stderr)
        if writer is not None:
            with self.lock:
                # Where a rank has inherited the descriptor, the launcher cannot know whether its last line has an end.
                is_unfinished = self.unfinished.pop(writer, None) is not None or self.is_inherited
                separator = b"\n" if is_unfinished else b""
                writer.write(self.last_line(writer).insert(separator + text.encode(errors="replace") + b"\n"))

    def last_line(self, writer: Writer) -> TerminalLine:
        """Return the line of a terminal that is replaced in place."""
        return self._lines.setdefault(writer, TerminalLine())

    def wait_until_written(self, seconds: float) -> None:
        """Wait until all output is written, or nothing was read for that long."""
        for writer in self._writers.values():
            writer.wait(seconds)

    def drain(self, seconds: float) -> list[str]:
        """Wait until all output is written, and return a message for each stream that has lost some.

        Args:
            seconds: How long to wait for a reader that reads nothing; the rest is discarded then.
        """
        writers, self._writers = self._writers, {}
        return [lost for writer in writers.values() if (lost := writer.drain(seconds))]

    def writer(self, stream: TextIO | None) -> Writer | None:
        """Return the writer for a stream; None if there is no such stream, as after `>&-`."""
        if stream is None:
            return None
        with self.lock:
            if not is_original(stream):
                return self._writers.setdefault(stream, TextStreamWriter(stream))
            with contextlib.suppress(OSError, ValueError):
                stream.flush()  # the output of this process comes first
            try:
                descriptor = stream.fileno()
                file = os.fstat(descriptor)
            except (OSError, ValueError):
                return None
            # Both streams are usually one terminal: a single writer keeps whole lines in their order.
            name = "standard output" if stream is sys.__stdout__ else "standard error"
            key = file.st_dev, file.st_ino
            return self._writers.setdefault(key, StreamWriter(descriptor, name, on_writable=self._call_on_writable))

    def _call_on_writable(self) -> None:
        for call in self.on_writable.copy():
            call()


def is_original(stream: TextIO) -> bool:
    """Return whether a stream is one that the process began with."""
    return stream in (sys.__stdout__, sys.__stderr__)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is shown on a terminal."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False
