"""The other bodies again, on the routes that worlds of this size on one host do not take by themselves.

Ranks of a host without a page agree over connections, and those of several hosts through the pages of these and over
connections; ranks of different hosts move data through the backend.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm import comm as comms
from rankwise._comm.control import tree
from rankwise._comm.control.hosts_channel import HostsChannel
from rankwise._comm.control.links import connect
from rankwise._comm.control.page import handshake
from rankwise._comm.control.socket_channel import SocketChannel
from rankwise._comm.data.plane import Support
from rankwise._comm.data.shared_memory_plane import SharedMemoryPlane
from rankwise._comm.data.socket_plane import SocketPlane
from rankwise._comm.group import Group
from tests.contract import (
    test_containers,
    test_divergences,
    test_extend,
    test_gather_broadcast_scatter,
    test_groups,
    test_local_failures,
    test_reduction,
    test_tensors,
    test_training,
)
from tests.lanes import variants

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usefixtures("torch_random")]

MODULES = [
    test_reduction,
    test_gather_broadcast_scatter,
    test_tensors,
    test_training,
    test_groups,
    test_containers,
    test_extend,
]


def bodies(module: ModuleType) -> dict[str, Callable[..., None]]:
    """Return the tests of a module whose only parameter is `comm`."""
    found = {name: body for name, body in vars(module).items() if name.startswith("test_") and callable(body)}
    return {name: body for name, body in found.items() if list(inspect.signature(body).parameters) == ["comm"]}


WAYS = ["sockets", "backend", "hosts"]


class NoPlane(SocketPlane):
    """A data plane that supports nothing."""

    support = Support(frozenset())


@contextmanager
def route(name: str, group: Group) -> Iterator[None]:
    """Use a route in this process and in the groups that it makes."""
    comm: Any = comm_of(group)
    registry = comm._registry
    with ExitStack() as stack:
        if name != "backend":
            stack.enter_context(connected_anew(name, group, comm, registry))
        if name != "sockets":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(registry, "moves_data_itself", lambda: False)
        if name == "backend":
            patch.setattr(comms, "SocketPlane", NoPlane)
            patch.setattr(comm.planes, "planes", comm.planes.planes[-1:])
        yield


@contextmanager
def connected_anew(way: str, group: Group, comm: Any, registry: Any) -> Iterator[None]:
    """Connect the ranks of a session anew, for a block: without a page, or as if each two were on a host."""
    prefix = rw.broadcast(secrets.token_hex(8), group=group)
    store = dist.PrefixStore(prefix, registry.store())
    with pytest.MonkeyPatch.context() as patch:
        if way == "sockets":
            patch.setattr(handshake, "MAX_RANKS", 0)
        else:
            patch.setattr(connect, "network_id", lambda: f"host{rw.get_rank() // 2}")
            patch.setattr(registry, "one_host", False)
        patch.setattr(tree, "FAN_OUT", 1)  # with three ranks, the second one forwards the calls of the third
        patch.setattr(registry, "store", lambda: store)
        patch.setattr(registry, "_links", None)
        patch.setattr(registry, "channels", {})
        patch.setattr(comm.control, "_channel", None)
        for plane in comm.planes.planes:
            if isinstance(plane, SharedMemoryPlane):  # its memory is of the page of the session
                patch.setattr(plane, "_staging", None)
        has_page = way == "hosts" and comm.size > 2 and comm.rank < 2
        opened = comm.control.open()
        if way == "sockets" or comm.size > 2:
            assert isinstance(opened, HostsChannel if has_page else SocketChannel)
        try:
            yield
        finally:
            registry.close("the route has ended")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("way", variants(WAYS, fast={"sockets", "hosts"}))
def test_every_body(comm: Group, module: ModuleType, way: str) -> None:
    with route(way, comm):
        assert bodies(module)
        for body in bodies(module).values():
            body(comm)


@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("way", WAYS)
def test_every_divergence(comm: Group, odd: int, way: str) -> None:
    odd %= comm.size
    with route(way, comm):
        for usual, other, _ in test_divergences.MISMATCHES.values():
            with pytest.raises(rw.MismatchError):
                (other if rw.get_rank() == odd else usual)(comm)
        for usual, other, wanted, message in test_divergences.FAILURES.values():
            with pytest.raises(wanted if rw.get_rank() == odd else rw.RemoteRankError, match=message):
                (other if rw.get_rank() == odd else usual)(comm)
        test_divergences.works(comm)


@pytest.mark.parametrize("odd", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("way", WAYS)
def test_out_of_memory_for_gradients_of_which_some_are_sparse(comm: Group, odd: int, way: str) -> None:
    """Each rank reduces what travels in frames of sockets, and the gather of the sparse ones follows."""
    with route(way, comm):
        test_local_failures.test_out_of_memory_at_every_step(comm, "sync_grads of sparse ones", odd)
