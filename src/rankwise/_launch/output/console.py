"""The console of a launcher: the output of ranks, shown line by line, with a prefix that names the rank."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection
from typing import Final, TextIO

from rankwise._launch.output.line_prefix import prefix_maker, shown_parts
from rankwise._launch.output.log_files import LogFile, LogFolder
from rankwise._launch.output.screen import Screen, is_original, is_terminal
from rankwise._launch.output.stream_writer import Writer
from rankwise._launch.output.terminal_line import fitted, last_state, moves_between_lines, visible_length

# How long the reader of the output may read nothing after the ranks have ended, until the rest is discarded: a person
# with a pager; a user who has stopped the launcher.
SECONDS_TO_READ: Final = 20.0
SECONDS_TO_READ_AFTER_STOP: Final = 2.0

# A longer line is shown in parts, so that the buffer stays small.
_LONGEST_LINE: Final = 1 << 16
_CONTROLS: Final = re.compile(rb"(\x1b\[[?\d;]*[A-Za-z])+")
# With more output that is held, the rank waits in its next write.
_MOST_HELD: Final = 1 << 20


class Console:
    """The display of the ranks of one launch.

    Attributes:
        logs: The log files of ranks.
        screen: Where their output is shown.
        run: The name of the launch among others of this process; "" if it is the only one.
        on_writable: Called, from any thread, when a writer that was full accepts data again.
    """

    def __init__(
        self,
        *,
        nproc: int,
        shown: Collection[int] | None = None,
        local_ranks: Collection[int] | None = None,
        prefixed: bool | str = True,
        logs: LogFolder | None = None,
        screen: Screen | None = None,
        run: str = "",
    ) -> None:
        """Prepare.

        Args:
            nproc: The number of ranks on this host.
            shown: The ranks whose output is shown; None for all.
            local_ranks: The same, by their local ranks.
            prefixed: The prefix of lines, as in `Output`.
            logs: The log files of ranks; None for none.
            screen, run: For one of several launches, which share a screen.
        """
        self.logs = LogFolder(None, redirects=None, tee=None) if logs is None else logs
        self.screen = Screen() if screen is None else screen
        self.run = run
        self._parts = (*(["run"] if run else []), *shown_parts(prefixed, nproc))
        self.on_writable: Callable[[], None] = lambda: None
        self.screen.on_writable.append(self._call_on_writable)
        self._nproc = nproc
        self._has_several_ranks = nproc > 1
        self._shown = shown
        self._local_ranks = local_ranks
        self._speaker: int | None = None
        self._outputs: list[RankOutput] = []

    @property
    def has_status(self) -> bool:
        """There is a terminal for a status line, and no launch beside this one has it."""
        return self._has_several_ranks and not self.run and is_terminal(sys.stderr)

    def show_status(self, text: str, *, last: bool = False) -> None:
        """Show a line on a terminal, if there are several ranks; unless it is the last, other output replaces it."""
        if self._has_several_ranks:
            self.screen.show_status(text, last=last)

    def clear_status(self) -> None:
        """Erase the line of `show_status`; that of several launches stays."""
        if not self.run:
            self.screen.clear_status()

    def print_message(self, text: str) -> None:
        """Show a message of the launcher on standard error."""
        self.screen.print_message(f"{self.run}: {text}" if self.run else text)

    def drain(self, seconds: float) -> list[str]:
        """Wait until all output is written, and return a message for each stream or file that has lost some.

        Args:
            seconds: How long to wait for a reader that reads nothing; the rest is discarded then.
        """
        in_logs = self.logs.close(seconds)
        self.logs.end()
        if self.run:  # the other launches still write
            self.screen.on_writable.remove(self._call_on_writable)
            return in_logs
        return in_logs + self.screen.drain(seconds)

    def inheritable_descriptor(self, stream: TextIO | None) -> int | None:
        """Return the descriptor of a stream, if a rank may write to it directly, as a program does that runs alone."""
        is_filtered = self._shown is not None or self._local_ranks is not None
        if self._has_several_ranks or is_filtered or self._parts or stream is None or not is_original(stream):
            return None
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):
            return None
        self.screen.is_inherited = True
        return descriptor

    def open(
        self,
        rank: int,
        stream: TextIO | None,
        *,
        local_rank: int | None = None,
        log: LogFile | None = None,
        host: str = "",
    ) -> RankOutput:
        """Return the display for a rank's output on a stream.

        Args:
            rank: The rank.
            stream: The stream of the launcher where it is shown.
            local_rank: Its local rank; None if it is the same number.
            log: The log file of its stream; None if it has none.
            host: Its host; "" for this one.
        """
        local_rank = rank if local_rank is None else local_rank
        is_hidden = (self._shown is not None and rank not in self._shown) or (
            self._local_ranks is not None and local_rank not in self._local_ranks
        )
        if stream is None or is_hidden or (log is not None and not log.is_teed):
            return RankOutput(self, rank, log=log)
        terminal = stream.fileno() if is_terminal(stream) else None
        coloured = terminal is not None
        prefix = prefix_maker(self._parts, rank, self._nproc, coloured=coloured, host=host, run=self.run)
        output = RankOutput(self, rank, prefix, self.screen.writer(stream), log=log, terminal=terminal)
        self._outputs.append(output)
        return output

    def hold(self, rank: int) -> None:
        """Hold the output of all ranks but one, which uses the terminal."""
        self._speaker = rank

    def release(self) -> None:
        """Show what was held."""
        self._speaker = None
        for output in self._outputs:
            output.show_held()
        self.on_writable()

    def is_held(self, rank: int) -> bool:
        """Return whether the output of a rank is held."""
        return self._speaker not in {None, rank}

    def open_log(self, local_rank: int, stream: int) -> LogFile | None:
        """Open the log file of a rank's stream, 1 or 2; None if it has none.

        Raises:
            LaunchError: It cannot be created.
        """

        def report(text: str) -> None:
            self.print_message(f"rankwise: {text}")

        return self.logs.open(local_rank, stream, on_writable=self._call_on_writable, on_failure=report)

    def _call_on_writable(self) -> None:
        self.on_writable()  # looked up now: a supervisor may have set it after the writer was made


class RankOutput:
    """The display of one rank's output on one stream, and its log. A line is shown as soon as it is whole."""

    def __init__(
        self,
        console: Console,
        rank: int,
        prefix: Callable[[], bytes] = bytes,
        writer: Writer | None = None,
        *,
        log: LogFile | None = None,
        terminal: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            console: The console.
            rank: The rank.
            prefix: Returns the prefix of a line.
            writer: Shows the output; None if it is not shown.
            log: Its log file; None if it has none.
            terminal: The descriptor of the terminal that shows it; None if it is no terminal.
        """
        self._console = console
        self._screen = console.screen
        self._rank = rank
        self._prefix = prefix
        self._writer = writer
        self._log = log
        self._terminal = terminal
        self._closed = False
        self._buffer = b""
        self._held = b""

    @property
    def is_full(self) -> bool:
        """The writer, or the log, has too much unwritten data."""
        is_log_full = self._log is not None and self._log.writer.is_full
        return is_log_full or len(self._held) >= _MOST_HELD or (self._writer is not None and self._writer.is_full)

    @property
    def is_live(self) -> bool:
        """The output is that of rank zero, shown on a terminal: the rank may find a terminal too."""
        return self._rank == 0 and self._terminal is not None and not self._console.run

    def window_size(self) -> tuple[int, int]:
        """Return how many lines and columns the output may take on the terminal; (0, 0) if that is unknown."""
        try:
            columns, lines = os.get_terminal_size(self._terminal or 0)
        except OSError:
            return 0, 0
        return lines, max(1, columns - visible_length(self._prefix())) if columns else 0

    def write(self, data: bytes) -> bool:
        """Buffer output of the rank, and show its whole lines; return False if nobody reads them any more."""
        self._screen.has_output = True
        if self._log is not None:
            self._log.write(data)
        if self._writer is None:
            return True
        if self._console.is_held(self._rank):
            self._held += data
            return True
        with self._screen.lock:
            self._add(data)
        return not self._closed or self._log is not None

    def show_held(self) -> None:
        """Show what was printed while the output was held."""
        held, self._held = self._held, b""
        if held:
            with self._screen.lock:
                self._add(held)

    def _add(self, data: bytes) -> None:
        """Buffer output, and show its whole lines."""
        self._buffer += data
        if self.is_live:
            self._draw()
        if self._terminal is not None and b"\r" in self._buffer:
            self._show_progress(self._terminal)
        # A progress bar ends each of its lines with a carriage return.
        end = self._buffer.rfind(b"\n") + 1 if self._terminal is not None else self._end_of_whole_lines()
        if not end and len(self._buffer) > _LONGEST_LINE:
            end = len(self._buffer)
        whole, self._buffer = self._buffer[:end], self._buffer[end:]
        self._show(whole)

    def write_log(self, text: bytes) -> None:
        """Add what the launcher reports of the rank to its log."""
        if self._log is not None:
            self._log.write(text)

    def flush(self, *, last: bool = False) -> None:
        """Show a line that is not whole yet, such as a prompt.

        Args:
            last: The rank has ended; its progress bar is shown for good.
        """
        if not self._console.is_held(self._rank):
            with self._screen.lock:
                self._flush(last=last)

    def _flush(self, *, last: bool) -> None:
        if last and self._writer is not None and (line := self._screen.last_line(self._writer)).is_drawn:
            self._buffer += b"\n" if line.owner is self else b""
            self._draw()
        if self._terminal is not None and self._buffer.startswith(b"\r"):
            if last:
                self._end_progress(self._buffer)
                self._buffer = b""
            return
        rest, self._buffer = self._buffer, b""
        if self._writer is not None and _CONTROLS.fullmatch(rest):
            self._writer.write(rest)  # such as that which shows the cursor again: there is no text for a prefix
        else:
            self._show(rest)

    def _end_of_whole_lines(self) -> int:
        return max(self._buffer.rfind(b"\n"), self._buffer.rfind(b"\r")) + 1

    def _draw(self) -> None:
        """Show the part of the buffer that belongs to bars in several lines."""
        if self._writer is None or self._closed:
            return
        line = self._screen.last_line(self._writer)
        if not (line.is_drawn and line.owner is self) and not moves_between_lines(self._buffer):
            return
        unfinished = self._screen.unfinished.pop(self._writer, None)
        separator = b"\n" if unfinished not in {None, self} else b""
        shown, self._buffer = line.draw(self._buffer, self._rank, self)
        self._closed = not self._writer.write(separator + shown)

    def _show_progress(self, terminal: int) -> None:
        """Show the whole lines of the buffer, and its rest as a progress bar."""
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = b""
        if lines:
            self._end_progress(*lines)
        if b"\r" not in rest:
            self._buffer = rest
            return
        state = last_state(rest)
        self._buffer = b"\r" + state + (b"\r" if rest.endswith(b"\r") and state else b"")
        if state and self._writer is not None:
            unfinished = self._screen.unfinished.pop(self._writer, None)
            separator = b"" if unfinished is None else b"\r" if unfinished is self else b"\n"
            text = fitted(self._prefix(), state, terminal)
            self._writer.write(separator + self._screen.last_line(self._writer).show(text, self._rank, self))

    def _end_progress(self, *lines: bytes) -> None:
        """Show lines, the first of which may be a progress bar of this output, for good."""
        if self._writer is not None and (last_line := self._screen.last_line(self._writer)).owner is self:
            self._writer.write(last_line.clear())
        self._show(b"".join(last_state(line) + b"\n" for line in lines))

    def _show(self, text: bytes) -> None:
        if not text or self._writer is None or self._closed:
            return
        unfinished = self._screen.unfinished.pop(self._writer, None)
        prefix = self._prefix()
        lines = text.splitlines(keepends=True)
        shown = b"".join([b"" if unfinished is self else prefix, lines[0], *(prefix + line for line in lines[1:])])
        if unfinished not in {None, self}:
            shown = b"\n" + shown
        if not text.endswith((b"\n", b"\r")):
            self._screen.unfinished[self._writer] = self
        self._closed = not self._writer.write(self._screen.last_line(self._writer).insert(shown))
