"""Groups in the forms that Ignite takes, in every world: process groups, and lists of ranks that are passed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
import rankwise.compat.ignite as idist
from rankwise._collectives.groups import comm_of
from rankwise._comm.comm import serial_comm
from rankwise._comm.group import Group
from rankwise._session.member_groups import MemberRendezvous
from tests.session.worlds import free_port, plain, run_ranks

PROGRAM = str(Path(__file__).parents[1] / "programs" / "ignite_lists.py")
worlds = pytest.mark.ranks("serial", 2, 4)


@worlds
def test_groups(comm: Group) -> None:
    rank, alone = rw.get_rank(), rw.backend() is None
    members = [other for other in range(comm.size) if other % 2 == 0]
    mine = rank in members
    made = [members, idist.new_group(members)]
    if rw.backend() == "xla":
        assert isinstance(made[1], rw.Group)
        with pytest.raises(ValueError, match="new_group takes no backend on XLA devices"):
            idist.new_group(members, backend="gloo")
    elif not alone:
        made += [dist.new_group(members), idist.new_group(members, backend="gloo")]
        assert isinstance(made[1], dist.ProcessGroup if mine else int)
    for group in made:
        for _ in range(2):
            assert idist.all_reduce(rank + 1, group=group) == (sum(members) + len(members) if mine else rank + 1)
            assert idist.all_gather(rank, group=group) == (members if mine else rank)
            assert idist.all_gather(torch.tensor([rank]), group=group).tolist() == (members if mine else [rank])
            shapes = [[other + 1] for other in members]
            parts = idist.all_gather_tensors_with_shapes(torch.ones(rank + 1), shapes, group=group)
            assert [len(part) for part in parts] == ([other + 1 for other in members] if mine else [rank + 1])
    assert idist.all_reduce(1, group=dist.group.WORLD) == comm.size


@worlds
def test_a_list_of_ranks_makes_one_group(comm: Group) -> None:
    if rw.backend() is None:
        return
    idist.all_reduce(1, group=[0, 1])
    before = len(comm_of(comm)._children)
    for _ in range(3):
        idist.all_reduce(1, group=[1, 0])
        idist.all_gather("x", group=(0, 1))
    assert len(comm_of(comm)._children) == before


@worlds
def test_members_alone_may_pass_a_list_of_ranks(comm: Group) -> None:
    """As with the original, for ranks that were in any groups before."""
    rank, last = rw.get_rank(), comm.size - 1
    if comm.size > 2:
        for members in ([1, 2], [2, 3]):
            if rank in members:
                assert idist.all_gather(rank, group=members) == members
    if rank == last:
        assert idist.all_reduce(torch.tensor([rank]), group=[last]).tolist() == [last]
    ends = sorted({0, last})
    if rank in ends:
        big = torch.full((70_000,), float(rank))
        assert idist.all_reduce(big, group=ends)[-1].item() == (last if comm.size > 1 else 0)
    assert idist.all_gather(rank, group=list(range(comm.size))) == list(range(comm.size))
    assert idist.all_reduce(1, group=idist.new_group(ends)) == (len(ends) if rank in ends else 1)


@worlds
def test_a_list_that_a_member_does_not_pass_is_refused_on_all(comm: Group) -> None:
    if comm.size < 4:
        return
    wanted = (rw.MismatchError, r"group=\[0, 1\] is passed here for the first time, but ranks \[1\] wait")
    for _ in range(2):
        if rw.get_rank() == 0:
            with pytest.raises(wanted[0], match=wanted[1]):
                idist.all_reduce(1, group=[0, 1])
        else:
            with pytest.raises(rw.RemoteRankError, match=wanted[1]):
                idist.all_reduce(1)
    for ranks in ([], [0, 0], [0, 4], [-1]):
        with pytest.raises(ValueError, match="each a rank of 4 and there once"):
            idist.all_reduce(1, group=ranks)
    assert idist.all_reduce(1, group=[0, 1]) == (2 if rw.get_rank() < 2 else 1)


@worlds
def test_members_that_were_refused_meet_at_once_again(comm: Group) -> None:
    """Each of them was refused: none still waits in its first call, and meets there those that are in their second."""
    rank = rw.get_rank()
    for members in ([0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]) if comm.size == 4 else ():
        with pytest.raises((rw.MismatchError, rw.RemoteRankError), match=f"but ranks \\[{members[-1]}\\] wait"):
            idist.all_gather(rank, group=members) if rank in members[:-1] else idist.barrier()
        assert idist.all_gather(rank, group=members) == (members if rank in members else rank)
        idist.barrier()


@pytest.mark.slow
def test_a_member_that_comes_late_or_never_is_named(tmp_path: Path) -> None:
    """The key of a rank that gave up waiting is not taken for that rank by a later attempt."""
    port = free_port()
    environs = [plain(rank, 3, port, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3") for rank in range(3)]
    zero, one, two = run_ranks(PROGRAM, environs, str(tmp_path))
    late = "the group of ranks [0, 1] could not be made within 0.5 s: ranks [{}] did not come".format
    assert [late(1) in zero.stdout, late(0) in one.stdout] == [True, True], zero.stderr + one.stderr
    assert [ended.stdout.splitlines()[-1] for ended in (zero, one)] == ["2", "2"]
    assert two.stdout.startswith("1\n")
    assert "the group of ranks [1, 2] could not be made: rank 1 is gone" in two.stdout
    assert (zero.returncode, one.returncode, two.returncode) == (0, 3, 0)


class Store(dist.HashStore):
    """A store that calls `before` once, just before a member writes the outcome of an attempt."""

    before: Callable[[], object] | None = None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        before, self.before = self.before, None
        if before is not None:
            before()
        return super().compare_set(key, expected, desired)


def two_members() -> list[MemberRendezvous]:
    """Return the rendezvous of ranks 0 and 1, as each of them has it; neither waits."""
    return [MemberRendezvous(serial_comm(torch.device("cpu")), rank, (0, 1), timeout=0.0) for rank in (0, 1)]


def test_a_member_that_comes_as_another_gives_up_is_met() -> None:
    """Else it would wait in a group that the other does not make."""
    zero, one = two_members()
    met: list[bool] = []
    store = Store()
    store.before = lambda: met.append(one.wait(store))
    met.append(zero.wait(store))
    assert met == [True, True]


def test_a_member_that_comes_once_another_gave_up_tries_again() -> None:
    zero, one = two_members()
    store = Store()
    with pytest.raises(rw.CollectiveTimeoutError, match=r"ranks \[1\] did not come"):
        zero.wait(store)
    assert [one.wait(store), zero.wait(store)] == [False, False]


def test_a_member_that_comes_once_another_was_refused_raises_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the frame of the third one, which waits, has not reached it; one that has had that error does not."""
    comms = [serial_comm(torch.device("cpu")) for _ in range(2)]
    zero, one = (MemberRendezvous(comm, rank, (0, 1, 2), timeout=9.0) for rank, comm in enumerate(comms))
    store = dist.HashStore()
    monkeypatch.setattr(comms[0].control, "pending_call_from", lambda rank: rank == 2)
    for member in (zero, one):
        with pytest.raises(rw.MismatchError, match=r"but ranks \[2\] wait"):
            member.wait(store)
    monkeypatch.setattr(type(comms[1].control), "sequence", 1)
    assert not one.wait(store)
