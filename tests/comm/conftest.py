"""Fixtures for tests of connections between members."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from rankwise._comm.control.mesh import Mesh
from torch.distributed import HashStore

from rankwise._comm.control import connect
from tests.comm import members


@pytest.fixture(params=["one host", "several hosts"])
def meshes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mesh]]:
    """The connected meshes of all members of a group."""
    if request.param == "several hosts":
        monkeypatch.setattr(connect, "network_id", lambda: str(threading.get_ident()))
    store = HashStore()
    connected: list[Mesh] = members.in_threads(lambda group_rank: members.connect(group_rank, store))
    assert all(mesh.same_host is (request.param == "one host") for mesh in connected)
    yield connected
    for mesh in connected:
        mesh.abandon()
