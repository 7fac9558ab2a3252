"""What rank zero says of ranks that met and then do not go on."""

from __future__ import annotations

import socket

import pytest

import rankwise as rw
from rankwise._rendezvous.readiness import RankMonitor


def test_a_rank_that_is_late_is_named_with_where_it_is() -> None:
    with socket.create_server(("", 0)) as listener:
        ends, connections = [], {}
        for rank, own in enumerate(("127.0.0.1", "127.0.0.2"), start=1):
            ends.append(socket.create_connection(("127.0.0.1", listener.getsockname()[1]), source_address=(own, 0)))
            connections[rank], _ = listener.accept()
        try:
            with pytest.raises(rw.JoinTimeoutError) as caught:
                RankMonitor(0, connections).monitored_barrier("", timeout=0.1)
        finally:
            for connection in (*ends, *connections.values()):
                connection.close()
    assert str(caught.value) == "rank 1; rank 2 on 127.0.0.2 met the others, but did not select a device within 0.1 s"
