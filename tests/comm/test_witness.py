"""The witness of a unit: a thread that writes on the board which ranks are gone."""

from __future__ import annotations

import os
import socket
import subprocess
import time

import pytest
from torch.distributed import HashStore

from rankwise._comm.control.board import SESSION, Board
from rankwise._comm.control.links.witness import Witness


def gone(store: HashStore) -> dict[int, str]:
    """Return which of the ranks 1 to 3 are gone, as another rank finds it on the board."""
    board = Board(store)
    board.look_for_losses()
    board.close()
    return {rank: reason for rank in (1, 2, 3) if (reason := board.gone(rank, 7))}


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
def test_ended_processes_and_connections_are_written_on_the_board() -> None:
    store = HashStore()
    board, process = Board(store), subprocess.Popen(["sleep", "1000"])
    pidfd, (own, other) = os.pidfd_open(process.pid), socket.socketpair()
    witness = Witness(board, {1: pidfd}, {2: own})
    other.send(b"a frame, which another thread reads")
    try:
        assert gone(store) == {}
        process.kill()
        other.close()
        deadline = time.monotonic() + 100
        while len(gone(store)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert set(gone(store)) == {1, 2}
        assert "killed or exited without cleanup" in gone(store)[1]
        assert own.recv(100)
    finally:
        process.kill()
        process.wait()
        witness.close()
        board.close()
        os.close(pidfd)
        own.close()


def test_a_rank_that_has_left_in_order_keeps_its_reason() -> None:
    store = HashStore()
    leaving, other = Board(store), Board(store)
    leaving.mark_gone(3, "left the session", SESSION)
    leaving.close()
    other.mark_gone(3, "is gone")
    other.close()
    assert gone(store) == {3: "left the session"}
