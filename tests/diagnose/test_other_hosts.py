"""The connections between the watchers of hosts: what arrives in pieces, is no message, or does not arrive."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rankwise._diagnose.other_hosts import OtherHosts, RankGoneError


@dataclass
class Connected:
    """The hosts node1 and node2 as a watcher sees them, their ends of the connections, and the end of its rank."""

    hosts: OtherHosts
    ends: list[socket.socket]
    rank: int


@pytest.fixture
def connected() -> Iterator[Connected]:
    pipe, rank = os.pipe()
    pairs = [socket.socketpair() for _ in range(2)]
    settings = [
        {"name": f"node{number}", "ranks": [number], "descriptor": own.detach(), "why_silent": "no answer"}
        for number, (own, _) in enumerate(pairs, 1)
    ]
    hosts = OtherHosts(settings, pipe)
    yield Connected(hosts, [other for _, other in pairs], rank)
    for host in hosts.hosts:
        if host.connection is not None:
            host.connection.close()
    for _, other in pairs:
        other.close()
    os.close(pipe)
    os.close(rank)


def test_messages_arrive_in_pieces_and_what_is_none_is_dropped(connected: Connected) -> None:
    node1, _ = connected.hosts.hosts
    connected.ends[0].sendall(b'{"due"')
    assert connected.hosts.wait(1) == []
    connected.ends[0].sendall(b": 3.5}\nno JSON\n[1]\n" + b"[" * 100_000 + b'\n{"look": true}\n{')
    found: list[object] = []
    while len(found) < 2:
        found += connected.hosts.wait(60)
    assert found == [(node1, {"due": 3.5}), (node1, {"look": True})]


def test_a_host_that_answers_nothing_or_disconnects_is_not_waited_for(connected: Connected) -> None:
    node1, node2 = connected.hosts.hosts
    assert connected.hosts.tell({"look": True})
    assert [json.loads(end.recv(100)) for end in connected.ends] == [{"look": True}] * 2
    connected.ends[0].sendall(b'{"due": 1}\n{"findings": 7}\n')
    assert connected.hosts.collect("findings", 0.1) == {node1: 7}
    assert (str(node2), node2.why_silent) == ("node2 (rank 2)", "no answer")
    connected.ends[1].close()
    connected.ends[0].sendall(b'{"findings": 8}\n')
    assert connected.hosts.collect("findings", 60) == {node1: 8}
    assert node2.why_silent == "the process that watches it has ended, or the host is lost"
    connected.ends[0].close()
    assert connected.hosts.collect("findings", 60) == {}
    assert not connected.hosts.tell({"look": True})


def test_an_endless_line_ends_the_connection(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise._diagnose.other_hosts.MAX_LINE_BYTES", 100)
    connected.ends[0].sendall(b"7" * 200)
    assert connected.hosts.wait(60) == []
    assert connected.hosts.hosts[0].connection is None


def test_the_end_of_the_rank_ends_the_wait(connected: Connected) -> None:
    os.write(connected.rank, b".")
    with pytest.raises(RankGoneError):
        connected.hosts.wait(60)
