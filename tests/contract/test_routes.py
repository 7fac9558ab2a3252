"""The other bodies again, on the routes that worlds of this size on one host do not take by themselves.

Ranks of a host without a page agree over connections; ranks of different hosts move data through the backend; groups
too large for frames agree through it as well.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._collectives.groups import comm_of
from rankwise._comm import comm as comms
from rankwise._comm.control import control, exchange
from rankwise._comm.control.page import handshake
from rankwise._comm.control.socket_channel import SocketChannel
from rankwise._comm.data.plane import Support
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


WAYS = ["sockets", "backend", "digests"]


class NoPlane(SocketPlane):
    """A data plane that supports nothing."""

    support = Support(frozenset())


@contextmanager
def route(name: str, group: Group) -> Iterator[None]:
    """Use a route in this process and in the groups that it makes."""
    comm: Any = comm_of(group)
    registry = comm._registry
    with ExitStack() as stack:
        if name == "sockets":
            stack.enter_context(connected_by_sockets(group, comm, registry))
        else:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(comms, "SocketPlane", NoPlane)
            patch.setattr(registry, "moves_data_itself", lambda: False)
            patch.setattr(comm.planes, "planes", comm.planes.planes[-1:])
        if name == "digests":
            patch.setattr(control, "MAX_FRAMES_SIZE", 1)
            patch.setattr(registry, "one_host", False)
            patch.setattr(comm.control, "uses_frames", False)
            comm.control.agree_by(comm.planes.planes[-1])
        yield


@contextmanager
def connected_by_sockets(group: Group, comm: Any, registry: Any) -> Iterator[None]:
    """Connect the ranks of a session anew, without a page, for a block."""
    prefix = rw.broadcast(secrets.token_hex(8), group=group)
    store = dist.PrefixStore(prefix, registry.store())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "MAX_RANKS", 0)
        patch.setattr(exchange, "MAX_STAR_SIZE", 2)  # with three ranks, the first one forwards their frames
        patch.setattr(registry, "store", lambda: store)
        patch.setattr(registry, "_links", None)
        patch.setattr(registry, "channels", {})
        patch.setattr(comm.control, "_channel", None)
        assert isinstance(comm.control.open(), SocketChannel)
        try:
            yield
        finally:
            registry.close("the route has ended")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("way", variants(WAYS, fast={"sockets", "digests"}))
def test_every_body(comm: Group, module: ModuleType, way: str) -> None:
    with route(way, comm):
        assert comm_of(comm).control.uses_frames is (way != "digests")
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
@pytest.mark.parametrize("way", ["sockets", "backend"])
def test_out_of_memory_for_gradients_of_which_some_are_sparse(comm: Group, odd: int, way: str) -> None:
    """Each rank reduces what travels in frames of sockets, and the gather of the sparse ones follows."""
    with route(way, comm):
        test_local_failures.test_out_of_memory_at_every_step(comm, "sync_grads of sparse ones", odd)


def test_numbers_are_as_exact_in_groups_without_frames(comm: Group) -> None:
    """The backend returns the same results as Python, and numbers that may not fit into 64 bits are gathered."""
    rank, size = rw.get_rank(), comm.size
    values = [rank, 2**62 - rank, 2**70 + rank, -(2**63), True, 0.1 * rank, complex(rank, 1), rank == 0]
    for op in ("sum", "mean", "product"):
        with_frames = rw.all_reduce(values, op=op)
        with route("digests", comm):
            with_digests = rw.all_reduce(values, op=op)
            alone = [rw.all_reduce(value, op=op) for value in values]
        for found in (with_digests, alone):
            assert found == pytest.approx(with_frames)
            assert [type(number) for number in found] == [type(number) for number in with_frames]
    with route("digests", comm):
        assert rw.all_reduce([2**62, 2**70 + rank, True, 0.5], op="max") == [2**62, 2**70 + size - 1, True, 0.5]
        assert rw.all_reduce(float("nan") if rank else 1.0, op="min") != 0
        assert torch.tensor(rw.all_reduce(float("nan") if rank else 1.0, op="min")).isnan()


def test_ranks_of_one_host_are_connected_however_many_they_are(comm: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would unpickle bytes from the backend, which listens where other users can connect."""
    monkeypatch.setattr(control, "MAX_FRAMES_SIZE", 1)
    part = rw.new_group(range(comm.size))
    assert comm_of(comm).control.uses_frames
    assert comm_of(part).control.uses_frames
    assert rw.all_gather("x" * 100_000, group=part) == ["x" * 100_000] * comm.size
