"""Where the ranks of a session are: hosts from what ranks have reported, units, and the memory that this takes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from rankwise._comm.control.links.places import Hosts, Places, Units

# Ranks 10 to 15: of the first host two and one more, one of another, and two of a third.
REPORTED = ["a 1 node1", "a 0 node1", "b 0 node2\x1b", "a 0 other", "c 1 node3", "c"]
RANKS = range(10, 16)
HOSTS = Hosts(("node1", "node2\\x1b", "node3"), "101", (2, 1, 1, 2), (0, 1, 0, 2))


def test_hosts_are_found_in_the_order_of_their_first_ranks() -> None:
    assert Hosts.of(REPORTED) == HOSTS
    assert Hosts.of(["", "x y z z"]) == Hosts(("", "z z"), "00", (1, 1), (0, 1))
    assert Hosts.of(["a 1 node"] * 4) == replace(Hosts.one(4), names=("node",), watched="1")


def test_places_and_units_of_ranks() -> None:
    places = Places(RANKS, HOSTS)
    assert places.by_host() == [[10, 11, 13], [12], [14, 15]]
    assert [places.host(rank) for rank in RANKS] == [0, 0, 1, 0, 2, 2]
    assert [places.host_name(rank) for rank in (11, 12, 15)] == ["node1", "node2\\x1b", "node3"]
    for has_page, numbers, leaders in (
        ([True, False, True], [0, 0, 1, 0, 2, 2], [10, 12, 14]),
        ([False, False, True], [0, 1, 2, 3, 4, 4], [10, 11, 12, 13, 14]),
        ([True, False, False], [0, 0, 1, 0, 2, 3], [10, 12, 14, 15]),
    ):
        units = Units(places, has_page)
        assert [units.of(rank) for rank in RANKS] == numbers
        assert [units.leader(number) for number in range(len(units))] == leaders


def test_ranks_of_some_global_ranks() -> None:
    places = Places([3, 5, 8], Hosts(("x", "y"), "00", (1, 2), (0, 1)))
    assert [places.host(rank) for rank in (3, 5, 8)] == [0, 1, 1]
    assert places.by_host() == [[3], [5, 8]]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(HOSTS, lengths=(2, 1, 1, 3)),
        replace(HOSTS, lengths=(2, 1, 3, 0)),
        replace(HOSTS, lengths=(2, 1, 3)),
        replace(HOSTS, lengths=()),
        replace(HOSTS, numbers=(0, 2, 0, 1)),
        replace(HOSTS, numbers=(0, 1, 0, 3)),
        replace(HOSTS, names=("node1",)),
        replace(HOSTS, watched="1"),
    ],
)
def test_lists_that_are_not_of_these_ranks(wrong: Hosts) -> None:
    assert HOSTS.are_of(6)
    assert not wrong.are_of(6)


def test_places_of_16384_ranks_take_an_eighth_of_a_megabyte() -> None:
    """On each of them, so that those of a host take one."""
    reported = [f"{rank // 8} 0 gpu-node-{rank // 8:05}.cluster.example.org" for rank in range(16_384)]
    hosts = Hosts.of(reported)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        units = Units(Places(range(16_384), hosts), [True] * len(hosts.names))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 17
    assert (len(units), units.of(16_383), units.leader(2047)) == (2048, 2047, 16_376)
