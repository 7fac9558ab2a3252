"""Fixtures for tests of the channels between members."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from rankwise._comm.control import connect, route
from rankwise._comm.control.links import Links
from rankwise._comm.control.page_channel import PageChannel
from tests.comm import members
from tests.comm.members import Member


def no_page(*_: Any, **_more: Any) -> None:
    """Stand for `share_page` on a host that cannot have a page."""


def network_of_a_pair() -> str:
    """Stand for the network of a host: the first two members are on one, and the third one is on another."""
    return str(int(threading.current_thread().name) // 2)


@pytest.fixture(params=["page", "sockets", "led sockets", "several hosts", "led hosts"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Links]]:
    """The connected ranks of a session."""
    if request.param == "several hosts":
        monkeypatch.setattr(connect, "network_id", lambda: threading.current_thread().name)
    if request.param == "led hosts":
        monkeypatch.setattr(connect, "network_id", network_of_a_pair)
    if request.param.startswith("led"):
        monkeypatch.setattr(route, "MAX_DIRECT_SIZE", 1)
    if request.param != "page":
        monkeypatch.setattr(connect, "share_page", no_page)
    store = HashStore()
    connected: list[Links] = members.in_threads(lambda group_rank: members.connect(group_rank, store))
    for own in connected:
        assert own.same_host is ("hosts" not in request.param)
        assert (own.page is not None) is (request.param == "page")
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
