"""What rank zero makes of the hellos. Pure."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

import rankwise as rw
from rankwise._environment.detect import detect
from rankwise._rendezvous.membership import JoinReply, JoinRequest, conflict, missing, replies_to
from rankwise._rendezvous.store import join_over_store
from tests.tables import each_row


def request(rank: int, host: str, **more: object) -> JoinRequest:
    fields: dict[str, object] = {
        "rank": rank,
        "world_size": 4,
        "local_rank": None,
        "local_world_size": None,
        "node_rank": None,
        "num_nodes": None,
        "host": host,
        "host_id": "boot",
        "process": 100 + rank,
    }
    return JoinRequest(**(fields | more))  # type: ignore[arg-type]  # fields by name


def places(*requests: JoinRequest) -> list[tuple[int, int, int, int]]:
    given = replies_to({each.rank: each for each in requests})
    return [
        (answer.local_rank, answer.local_world_size, answer.node_rank, answer.num_nodes)
        for _, answer in sorted(given.items())
    ]


def test_nodes_may_be_uneven() -> None:
    assert places(request(0, "a"), request(1, "b"), request(2, "b"), request(3, "b")) == [
        (0, 1, 0, 2),
        (0, 3, 1, 2),
        (1, 3, 1, 2),
        (2, 3, 1, 2),
    ]


def test_ranks_may_be_dealt_out_in_turn() -> None:
    assert places(request(0, "b"), request(1, "a"), request(2, "b"), request(3, "a")) == [
        (0, 2, 0, 2),
        (0, 2, 1, 2),
        (1, 2, 0, 2),
        (1, 2, 1, 2),
    ]


def test_hosts_of_one_name_are_told_apart() -> None:
    assert [place[3] for place in places(request(0, "localhost"), request(1, "localhost", host_id="other"))] == [2, 2]


def test_ranks_of_one_local_rank_are_on_different_nodes() -> None:
    assert [place[2:] for place in places(*(request(rank, "a", local_rank=rank % 2) for rank in range(4)))] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]


def test_a_problem_of_one_rank_is_told_to_all() -> None:
    given = replies_to({0: request(0, "a"), 1: request(1, "b", problem="no device")})
    assert {answer.error for answer in given.values()} == {"rank 1 on b: no device"}


def test_what_the_launcher_said_is_kept() -> None:
    reading = JoinReply(local_rank=9, local_world_size=9, node_rank=1, num_nodes=3).complete(
        detect({"RANK": "1", "WORLD_SIZE": "10", "LOCAL_RANK": "1"})
    )
    assert str(reading.local_rank) == "1 (from LOCAL_RANK)"
    assert str(reading.num_nodes) == "3 (from the other ranks)"


def test_conflicts() -> None:
    assert conflict(request(0, "a"), request(1, "b")) == ""
    assert "two processes have rank 1: 101 on a and 101 on b" in conflict(request(1, "a"), request(1, "b"))
    assert "has a world size of 4, but rank 1 on b has 5" in conflict(request(0, "a"), request(1, "b", world_size=5))


def test_texts() -> None:
    assert missing({0: request(0, "a")}, 3, timeout=5).startswith(
        "ranks 1-2 of 3 did not arrive within 5 s; rank 0 did"
    )
    assert JoinRequest.decode(request(0, "é").encode()) == request(0, "é")


@each_row("odd", ["", "[", "[" * 60_000, "{}", "null", '{"error": 1}', b"\xff"])
def test_what_is_no_answer_is_refused(odd: str | bytes) -> None:
    for text in (odd, JoinReply(store_port=1 << 16).encode(), JoinReply(store_port=-1).encode()):
        with pytest.raises(rw.JoinError, match="the reply of rank zero is malformed"):
            JoinReply.decode(text)
    with pytest.raises(ValueError):
        JoinRequest.decode(odd)
    given = JoinReply(error="é" * 9000, late=True)
    assert JoinReply.decode(given.encode()).late


@each_row(
    ("name", "value"),
    [("local_rank", "1"), ("local_rank", True), ("late", 0), ("error", 1), ("num_nodes", 1.5), ("num_nodes", 1 << 64)],
)
def test_a_field_of_another_type_is_refused(name: str, value: object) -> None:
    answer = json.loads(JoinReply().encode())
    assert JoinReply.decode(json.dumps(answer)) == JoinReply()
    with pytest.raises(rw.JoinError, match=f"malformed: {name} is"):
        JoinReply.decode(json.dumps(answer | {name: value}))


def test_ranks_that_say_odd_things_in_a_store_are_named_to_all() -> None:
    """Where the launcher serves it, others can write into it."""
    for odd in ("{", request(2, "b").encode(), json.dumps({"rank": []})):
        store = HashStore()
        PrefixStore("1", store).set("request/1", odd)
        with ThreadPoolExecutor() as pool:
            zero = pool.submit(join_over_store, store, replace(request(0, "a"), world_size=2), timeout=5.0)
            answer = zero.result()[0]
        assert answer.error.startswith("the request of rank 1 in the store is malformed: ")
        assert PrefixStore("1", store).check(["reply/0"]) is False, "taken back"


def test_a_store_that_fails_is_an_error_of_ours() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    del store
    with pytest.raises(rw.JoinError, match="the store where the ranks meet failed"):
        join_over_store(client, request(1, "a"), timeout=1.0)
