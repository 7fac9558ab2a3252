"""What a rank asks of the store while it joins, connects and leaves: as much in a large job as in a small one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from rankwise._comm.control.board import Board
from rankwise._comm.control.links import connect
from rankwise._comm.control.tree import FAN_OUT
from rankwise._rendezvous.store import join_over_store
from rankwise._rendezvous.store_reads import get_all, longest_pause
from tests.comm.counting_store import PER_HOST, CountingStore, asked_while_joining, host_of_thread, request_of

MEMBER = Counter(set=2, get=4, check=4, add=1)
# Its page, that it has one, and its address are written, and the address of the leader above it is read.
LEADER = Counter(set=5, get=4, check=4, add=1)


@pytest.mark.parametrize("size", [32, 160])
def test_a_rank_asks_a_constant_number_of_questions(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty-two ranks have one step of the tree, and 160 two."""
    monkeypatch.setattr(connect, "network_id", host_of_thread)
    assert (size // PER_HOST > 1 + FAN_OUT) is (size == 160)
    first, *others = asked_while_joining(size)
    for rank, asked in enumerate(others, start=1):
        assert Counter(what for what, *_ in asked) == (LEADER if rank % PER_HOST == 0 else MEMBER)
        assert sum(asked.values()) < 1200 + size
        assert all(len(keys) == 1 for _, *keys in asked), "of its own entries, or of those for all"
    # The first one reads all requests and hosts, some hundred at a time, and writes all replies, and two lists.
    assert Counter(what for what, *_ in first)["set"] == size + LEADER["set"] + 2
    assert len(first) - size < 25


def test_the_first_rank_reads_many_requests_from_a_store_of_another_process() -> None:
    size = 600
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    for rank in range(1, size):
        store.set(f"1/request/{rank}", request_of(rank, size).encode())
    reply, session = join_over_store(client, request_of(0, size), timeout=100.0)
    assert (reply.error, reply.num_nodes) == ("", size // PER_HOST)
    replies = get_all(session, [f"reply/{rank}" for rank in range(size)])
    assert len(replies) == size
    assert b'"node_rank": 74,' in replies[-1]


def test_ranks_ask_more_rarely_in_larger_jobs() -> None:
    """Twenty thousand of them ask 50,000 times a second, which takes a third of the process that serves the store."""
    assert longest_pause(0.02, 8) < 0.021
    assert 20_000 / longest_pause(0.02, 20_000) < 50_000


def test_a_rank_that_leaves_does_not_read_who_has_left() -> None:
    shared = HashStore()
    for rank in range(100):
        store: Any = CountingStore(shared)
        board = Board(store)
        board.mark_gone(rank, "left the session")
        board.close()
        assert Counter(what for what, *_ in store.asked) == Counter(check=1, add=1, set=2)
    witness: Any = CountingStore(shared)
    board = Board(witness)
    board.mark_gone(37, "is gone")
    board.close()
    assert list(witness.asked.values()) == [0]
