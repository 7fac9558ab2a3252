"""The witness of a unit: a thread of its leader that writes on the board which ranks are gone.

Ranks of other hosts may wait for a rank that has died while no rank of its host is in a collective. Each leader watches
the processes of its host, and the connections to its neighbours in the tree of the session: so each rank is watched by
another process, the leaders too.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from functools import partial

from rankwise._comm.control.board import Board
from rankwise._comm.control.links.peer import CLOSED
from rankwise._net.polling import Descriptor, EventLoop

_ONE_DAY: float = 86400.0


class Witness:
    """Such a thread."""

    def __init__(self, board: Board, processes: Mapping[int, int], connections: Mapping[int, socket.socket]) -> None:
        """Begin to watch.

        Args:
            board: The board of the session.
            processes: Descriptors of the processes of ranks (pidfd), by global rank.
            connections: Connections to ranks. Other threads read and write them.
        """
        self._board = board
        self._pid = os.getpid()
        self._is_closed = False
        self._loop = EventLoop()
        for rank, process in processes.items():
            self._loop.register(process, partial(self._mark_gone, rank, process))
        for rank, connection in connections.items():
            self._loop.register_end(connection, partial(self._mark_gone, rank, connection))
        self._closing, self._closer = socket.socketpair()
        self._loop.register(self._closing, self._end)
        self._thread = threading.Thread(target=self._run, name="rankwise: lost ranks of this host", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, which a forked child does not have."""
        if os.getpid() == self._pid:
            self._closer.send(b"\0")
            self._thread.join()
        self._loop.close()
        self._closing.close()
        self._closer.close()

    def _run(self) -> None:
        while not self._is_closed:
            self._loop.run_once(_ONE_DAY)

    def _end(self) -> None:
        self._is_closed = True

    def _mark_gone(self, rank: int, watched: Descriptor) -> None:
        self._loop.unregister(watched)
        self._board.mark_gone(rank, CLOSED)
