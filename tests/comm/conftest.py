"""Fixtures for tests of the channels between members."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from rankwise._comm.control import tree
from rankwise._comm.control.links import connect
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.page_channel import PageChannel
from tests.comm import members
from tests.comm.members import Member


def no_page(*_: Any, **_more: Any) -> None:
    """Stand for `share_page` on a host that cannot have a page."""


def network_of_a_pair() -> str:
    """Stand for the network of a host: each has two members, but the last one may have one."""
    return str(int(threading.current_thread().name) // 2)


ROUTES = ["page", "sockets", "led sockets", "several hosts", "pages of hosts"]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the ranks of a session agree."""
    route: str = request.param
    if route == "several hosts":
        monkeypatch.setattr(connect, "network_id", lambda: threading.current_thread().name)
    if route == "pages of hosts":
        monkeypatch.setattr(connect, "network_id", network_of_a_pair)
    if route in ("led sockets", "pages of hosts"):
        monkeypatch.setattr(tree, "FAN_OUT", 1)
    if not route.startswith("page"):
        monkeypatch.setattr(connect, "share_page", no_page)
    return route


@pytest.fixture
def links(request: pytest.FixtureRequest, route: str) -> Iterator[list[Links]]:
    """The connected ranks of a session: three, or as many as the test passes as a parameter."""
    store, size = HashStore(), getattr(request, "param", members.SIZE)
    connected: list[Links] = members.in_threads(lambda group_rank: members.connect(group_rank, store, size), size)
    for number, own in enumerate(connected):
        assert own.same_host is ("hosts" not in route)
        in_pair = number < size - size % 2
        assert (own.page is not None) is (route == "page" or (route == "pages of hosts" and in_pair))
    yield connected
    for own in connected:
        own.close()


@pytest.fixture
def group(links: list[Links]) -> Iterator[list[Member]]:
    """The members of the group of all ranks."""
    opened = members.open_group(links)
    assert all(isinstance(member.channel, PageChannel) is (member.links.page is not None) for member in opened)
    yield opened
    for member in opened:
        member.leave("the test has ended")
