"""What the original gets wrong, and the drop-in does not: a test for each line of docs/migrate.md that has no other."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, Sampler

import rankwise as rw
import rankwise.compat.ignite as idist
from rankwise._comm.group import Group
from rankwise._environment.detect import detect
from rankwise._environment.hostlist import expand
from rankwise._session.current import reset_current, set_current
from rankwise._session.session import SessionState

TEXTS = ("é", "héllo", "日本", "🙂" * 2000, "\0", "ascii")


@pytest.fixture
def own_group() -> Iterator[None]:
    """Let a test open process groups as other code does, and leave none."""
    hook = sys.excepthook
    yield
    idist.finalize()
    sys.excepthook = hook


def open_group(backend: str | None = "gloo") -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.ranks("serial", 2, 4)
def test_strings_survive_in_any_language(comm: Group) -> None:
    rank = rw.get_rank()
    for text in TEXTS:
        wanted = [text * (other + 1) for other in range(comm.size)]
        assert idist.all_gather(text * (rank + 1)) == wanted
        assert idist.broadcast(text * (rank + 1), src=comm.size - 1) == wanted[-1]
        assert idist.broadcast(text * (rank + 1) if rank == 0 else None, safe_mode=True) == text
        members = list(range(0, comm.size, 2))
        gathered = idist.all_gather(text * (rank + 1), group=members)
        assert gathered == ([wanted[other] for other in members] if rank in members else wanted[rank])


@pytest.mark.ranks("serial", 2, 4)
def test_numbers_keep_their_type_and_value(comm: Group) -> None:
    last = comm.size - 1
    for number in (123456789, 2**62 + 1, 2**100, 0.1, 1e300, True, 3 + 4j, -7):
        got = idist.broadcast(number if rw.get_rank() == last else 0, src=last)
        assert (got, type(got)) == (number, type(number))
        assert idist.all_gather(number) == [number] * comm.size
    assert idist.all_reduce(2**62) == 2**62 * comm.size


@pytest.mark.ranks(2)
def test_a_collective_of_members_alone_leaves_the_others_alone(comm: Group) -> None:
    """The original finds out how long strings are from everybody, so this waits for rank 1 for ever."""
    group = idist.new_group([0])
    if rw.get_rank() == 0:
        assert idist.all_gather("text", group=group) == ["text"]
    assert idist.all_reduce(1) == 2


def test_what_was_destroyed_or_opened_by_others_is_noticed(own_group: None) -> None:
    for _ in range(2):
        assert (idist.model_name(), idist.backend(), idist.get_world_size()) == ("serial", None, 1)
        open_group()
        assert (idist.model_name(), idist.backend(), idist.get_rank()) == ("native-dist", "gloo", 0)
        assert idist.all_gather(torch.tensor(5)).shape == (1,)
        dist.destroy_process_group()
    idist.initialize("gloo")
    dist.destroy_process_group()
    assert idist.model_name() == "serial"
    open_group()
    assert idist.all_reduce(3) == 3
    idist.finalize()
    assert not dist.is_initialized(), "Ignite documents that it is destroyed"


def test_a_session_of_rankwise_is_one_of_ignite(own_group: None) -> None:
    with rw.init():
        assert (idist.model_name(), idist.backend()) == ("native-dist", "gloo")
        with pytest.raises(RuntimeError, match=r"default one is already initialized .*call finalize"):
            idist.initialize("gloo")
    assert idist.model_name() == "serial"
    open_group()
    with rw.init():
        idist.finalize()
    assert not dist.is_initialized()


def test_the_backend_has_a_name_whoever_chose_it(own_group: None) -> None:
    open_group(None)
    assert idist.backend() == "gloo"


def test_uneven_nodes_are_what_their_launcher_says() -> None:
    """Two nodes, of one rank and of three: the original computes an impossible topology from the largest."""
    environ = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"}
    set_current(SessionState(detect(environ)))
    places = [idist.get_nproc_per_node(), idist.get_nnodes(), idist.get_node_rank(), idist.get_local_rank()]
    reset_current()
    assert places == [1, 2, 0, 0]


def test_device_says_nothing_of_indices(own_group: None) -> None:
    open_group()
    idist.set_local_rank(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert idist.device() == torch.device("cpu"), "as Ignite documents for gloo"


def test_a_hint_is_forgotten_in_the_end() -> None:
    session = SessionState(detect({"RANK": "3", "WORLD_SIZE": "4"}))
    set_current(session)
    idist.set_local_rank(2)
    hinted = idist.get_local_rank()
    idist.finalize()
    set_current(session)
    with pytest.raises(rw.NotJoinedError, match="local_rank cannot be known"):
        idist.get_local_rank()
    reset_current()
    assert hinted == 2
    for index in (-1, True, "0", None):
        with pytest.raises(ValueError, match="is not a local rank"):
            idist.set_local_rank(index)  # type: ignore[arg-type]  # that is the point


def test_host_lists_are_read_as_slurm_writes_them() -> None:
    """With the original `node[0-3]` is node00 to node03, and `rack[1-2]node[1-2]` has a host called 1-2."""
    assert expand("node[0-3]") == ["node0", "node1", "node2", "node3"]
    assert expand("rack[1-2]node[1-2]") == ["rack1node1", "rack1node2", "rack2node1", "rack2node2"]


def test_finalize_leaves_the_environment_alone(own_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original restores the hook of `initialize`, also over one that was set since."""
    idist.initialize("gloo")
    monkeypatch.setenv("SET_SINCE", "1")
    before = dict(os.environ)
    idist.finalize()
    assert dict(os.environ) == before


def test_the_proxy_sampler_leaves_random_states_alone() -> None:
    import random  # noqa: PLC0415 - to check its state afterwards

    def states() -> tuple[Any, ...]:
        return random.getstate(), torch.random.get_rng_state().tolist()

    sampler = idist.DistributedProxySampler(RandomSampler(range(9)), num_replicas=2, rank=0)
    before = states()
    first = list(sampler)
    assert states() == before
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_samplers_that_cannot_be_shared_out_are_refused() -> None:
    class Empty(Sampler[int]):
        """Says that there are three, and draws none: the original draws for ever."""

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(())

    class Endless(Sampler[int]):
        """Has no length."""

    with pytest.raises(ValueError, match="draws nothing"):
        iter(idist.DistributedProxySampler(Empty(), num_replicas=2, rank=0))
    for wrong in (Endless(), range(3), idist.DistributedProxySampler(Empty(), num_replicas=2, rank=0)):
        with pytest.raises(TypeError, match=r"^Argument sampler"):
            idist.DistributedProxySampler(wrong, num_replicas=2, rank=0)  # type: ignore[arg-type]


@pytest.mark.ranks(2, 4)
def test_auto_dataloader_says_what_a_batch_size_leaves_out(comm: Group) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ignite.distributed.auto.auto_dataloader")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    data: Any = range(64)
    assert idist.auto_dataloader(data, batch_size=4 * comm.size).batch_size == 4
    assert records == []
    assert idist.auto_dataloader(data, batch_size=4 * comm.size + 1).batch_size == 4
    told = f"batch_size={4 * comm.size + 1} does not divide among {comm.size} ranks"
    assert [record[: len(told)] for record in records] == [told] * (rw.get_rank() == 0), "rank zero alone logs"


@pytest.mark.ranks(2, 4)
def test_what_cannot_be_shared_out_is_said(comm: Group) -> None:
    data: Any = range(8)
    with pytest.warns(UserWarning, match="Found batch_sampler in provided kwargs"):
        idist.auto_dataloader(data, batch_sampler=[[0]])
    foreign: Any = torch.utils.data.DistributedSampler(data, num_replicas=7, rank=6)
    with pytest.warns(UserWarning, match="Found distributed sampler") as warned:
        idist.auto_dataloader(data, sampler=foreign)
    assert [str(warning.message) for warning in warned] == [
        f"Found distributed sampler with rank=6, but process rank is {rw.get_rank()}",
        f"Found distributed sampler with num_replicas=7, but world size is {comm.size}",
    ]
