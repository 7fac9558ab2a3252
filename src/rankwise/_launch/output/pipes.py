"""The pipes that ranks print to. The launcher reads them no faster than their output can be shown.

Rank zero gets a pseudo-terminal in place of a pipe where the launcher shows its output on a terminal, so that programs
find a terminal there, as without a launcher: progress bars that move, colours, the size of the window.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
from functools import partial
from io import RawIOBase
from typing import TextIO

from rankwise._launch.forkserver.ipc import READ_BYTES
from rankwise._launch.output.console import Console, RankOutput
from rankwise._net.polling import READABLE, EventLoop, poll


class OutputPipes:
    """The pipes of all ranks, registered in the supervisor's event loop."""

    def __init__(self, loop: EventLoop, console: Console) -> None:
        self._loop = loop
        self._console = console
        self._reads: dict[RawIOBase, Callable[[], None]] = {}
        # Back pressure, with a high watermark and no timer. A rank writes to its pipe; the loop reads the pipe and
        # hands the data to the display, which a thread writes to the terminal. When a reader is slow (`| less`,
        # Ctrl-S), data collects in the display; above its watermark (`is_full`) the pipe is taken out of the loop. It
        # fills up, and the rank blocks in its write, as it would with the terminal itself. When the writer's thread has
        # room again it wakes the loop, which reads on. Nothing else waits meanwhile: ends, signals and messages come
        # over descriptors of their own. Once the ranks have ended, pipes are read to their ends whatever is full: what
        # is in them is at most the size of the pipes, and their processes are gone.
        self._paused: dict[RawIOBase, Callable[[], None]] = {}
        self._reads_all = False
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_reader.setblocking(False)
        self._wakeup_writer.setblocking(False)
        loop.register(self._wakeup_reader, self._receive_wakeup)
        console.on_writable = self._wake_up

    @property
    def any_open(self) -> bool:
        """Some process may still print."""
        return bool(self._reads)

    @property
    def any_paused(self) -> bool:
        """Some pipe is not read for now: it may hold the rest of a line."""
        return bool(self._paused)

    def open(self, rank: int, stream: TextIO | None, number: int, local_rank: int) -> tuple[int, RankOutput]:
        """Return a descriptor for a standard stream of a rank, and the display of its output.

        Args:
            rank: The rank.
            stream: The launcher's own stream of that kind.
            number: The number of the stream, 1 or 2.
            local_rank: The local rank.

        Raises:
            LaunchError: Its log file cannot be created.
        """
        log = self._console.open_log(local_rank, number)
        output = self._console.open(rank, stream, local_rank=local_rank, log=log)
        if log is not None and not log.is_teed:
            return os.dup(log.descriptor), output
        if log is not None:
            return self.pipe(output.write, lambda: output.is_full), output
        inherited = self._console.inheritable_descriptor(stream)
        if inherited is not None:
            return os.dup(inherited), output
        if output.is_live:
            with contextlib.suppress(OSError):  # no pseudo-terminal is left, or none is mounted
                return self._pseudo_terminal(output), output
        return self.pipe(output.write, lambda: output.is_full), output

    def _pseudo_terminal(self, output: RankOutput) -> int:
        """Return the rank's end of a new pseudo-terminal, whose window has the size that the output may take."""
        ours, theirs = os.openpty()
        modes = termios.tcgetattr(theirs)
        modes[1] &= ~termios.OPOST  # the launcher's terminal turns the ends of lines into what it needs
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, modes)

        def show(data: bytes) -> bool:
            _set_window_size(ours, output)  # programs ask for it before each picture of a bar
            return output.write(data)

        _set_window_size(ours, output)
        self._register(ours, show, lambda: output.is_full)
        return theirs

    def pipe(self, on_data: Callable[[bytes], object], is_full: Callable[[], bool] = lambda: False) -> int:
        """Return the writable end of a new pipe.

        Args:
            on_data: Called with the data that is read from the pipe, until it returns False.
            is_full: Returns whether to pause reading.
        """
        reader, writer = os.pipe()
        self._register(reader, on_data, is_full)
        return writer

    def _register(self, reader: int, on_data: Callable[[bytes], object], is_full: Callable[[], bool]) -> None:
        pipe = os.fdopen(reader, "rb", buffering=0)
        self._reads[pipe] = partial(self._read, pipe, on_data, is_full)
        self._loop.register(pipe, self._reads[pipe])

    def read_now(self) -> None:
        """Read what the ranks have printed until now."""
        for pipe, read in list(self._reads.items()):
            if pipe not in self._paused and poll({pipe.fileno(): READABLE}, 0):
                read()

    def read_all(self) -> None:
        """Read the pipes to their ends, though the output cannot be shown yet: the processes that wrote it are gone."""
        self._reads_all = True
        self._resume()

    def close_all(self) -> None:
        """Close all pipes; new ones may follow."""
        for pipe in list(self._reads):
            self._close(pipe)
        self._reads_all = False

    def close(self) -> None:
        """Close the sockets that wake up the loop."""
        self._console.on_writable = lambda: None
        self._wakeup_reader.close()
        self._wakeup_writer.close()

    def _read(self, pipe: RawIOBase, on_data: Callable[[bytes], object], is_full: Callable[[], bool]) -> None:
        if pipe.closed or pipe in self._paused:
            return  # by a callback that ran after the same wait
        try:
            data = pipe.read(READ_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:  # the end of a pseudo-terminal
                raise
            data = b""
        if not data or on_data(data) is False:  # closed, so that the rank gets EPIPE when nobody reads its output
            self._close(pipe)
        elif is_full() and not self._reads_all:
            self._loop.unregister(pipe)
            self._paused[pipe] = partial(self._read, pipe, on_data, is_full)

    def _close(self, pipe: RawIOBase) -> None:
        if self._paused.pop(pipe, None) is None:
            self._loop.unregister(pipe)
        del self._reads[pipe]
        pipe.close()

    def _resume(self) -> None:
        while self._paused:
            pipe, read = self._paused.popitem()
            self._loop.register(pipe, read)

    def _wake_up(self) -> None:
        """Let the event loop resume reading. A writer's thread calls this, perhaps after `close`."""
        with contextlib.suppress(OSError):
            self._wakeup_writer.send(b"\0")

    def _receive_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup_reader.recv(READ_BYTES)
        self._resume()


def _set_window_size(descriptor: int, output: RankOutput) -> None:
    lines, columns = output.window_size()
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
