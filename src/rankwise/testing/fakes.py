"""Fake worlds in one process, for tests of logic: one records its collectives, one of any size does nothing."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rankwise import _torch
from rankwise._arguments import as_integer
from rankwise._collectives.scatter import Following
from rankwise._collectives.serialization import serialize
from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Move
from rankwise._comm.control.control import Control
from rankwise._comm.control.protocol import Description
from rankwise._comm.control.verdict import Combine, Verdict, combined
from rankwise._comm.data.plane import DataPlane, Pieces, Support
from rankwise._comm.data.planes import Planes
from rankwise._comm.group import Group
from rankwise._comm.reduce_ops import Op
from rankwise._environment.facts import MAX_RANKS
from rankwise._session.current import opened_session, reset_current, set_current
from rankwise._session.environ import read_environment
from rankwise._session.session import Session, SessionState
from rankwise.errors import InvalidArgumentError, RemoteRankError, shown
from rankwise.testing.environments import fake_torchrun


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded call of a collective.

    Attributes:
        operation: The name of the function.
        settings: The arguments that have to be the same on all ranks.
        ranks: The global ranks of the members.
    """

    operation: str
    settings: Mapping[str, object] = field(default_factory=dict)
    ranks: tuple[int, ...]


class RecordingGroup(Group):
    """A group that records its calls, and does not communicate: made by `recording()`."""

    __slots__ = ("_calls",)

    def __init__(self, comm: Comm, calls: list[Recorded]) -> None:
        super().__init__(comm, close_refusal="the group of all ranks is closed with its session, after the block")
        self._calls = calls

    @property
    def calls(self) -> list[Recorded]:
        """The collectives that were called, in this group and in those made from it."""
        return self._calls


class _FakeControl(Control):
    """The control plane of a recording group: the other ranks make the calls of this one, with the same values.

    Values that another rank sends alone, in `broadcast` and `scatter`, are taken from replies.
    """

    def __init__(self, rank: int, ranks: Sequence[int], calls: list[Recorded], replies: Iterator[object]) -> None:
        super().__init__(ranks, rank)
        self.is_connected = True
        self.num_combined = self.size
        self.calls = calls
        self.replies = replies
        self.incoming: list[torch.Tensor] = []  # the buffers of the last reply, which the transfer after it moves

    def agree(
        self,
        call: Description,
        message: bytes,
        combine: Combine | None,
        read: Collection[int],
        timeout: float | None,  # noqa: ARG002
    ) -> Verdict:
        if not call.is_data:
            self.calls.append(Recorded(operation=call.operation, settings=dict(call.settings), ranks=tuple(self.ranks)))
        verdict = combined([message] * self.num_combined, combine)
        is_reply = len(read) == 1 and self.rank not in read and call.operation in {"broadcast", "scatter"}
        verdict.bodies = dict.fromkeys(read, self._reply(call) if is_reply else message)
        return verdict

    def report(self, call: Description, failure: RemoteRankError) -> None:
        """Send nothing: there are no other ranks."""

    def _reply(self, call: Description) -> bytes:
        """Return the message of the next reply."""
        try:
            reply = next(self.replies)
        except StopIteration:
            raise InvalidArgumentError(f"{call.title}: another rank sends here, but no reply is left") from None
        payload = serialize(reply)
        self.incoming = list(payload.buffers.values())
        header = payload.header.encode()
        if call.operation == "broadcast":
            return header
        return pickle.dumps([Following.of([payload]).value + header] * self.size)


class _FakePlane(DataPlane):
    """The data plane of a recording group."""

    def __init__(self, control: _FakeControl) -> None:
        self._control = control
        self._own = control.rank
        self._size = control.size

    @property
    def support(self) -> Support:
        return Support()

    def _all_reduce(self, tensor: torch.Tensor, op: Op) -> Move:
        def run() -> None:
            op.reduce_copies(tensor, self._size)

        return run

    def _reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, op: Op) -> Move:
        return self._all_reduce(out.copy_(pieces[self._own or 0]), op)

    def _all_gather(self, data: torch.Tensor, gathered: Sequence[torch.Tensor]) -> Move:
        def run() -> None:
            for part in gathered:
                part.copy_(data)

        return run

    def _broadcast(self, data: torch.Tensor, src: int) -> Move:
        def run() -> None:
            if self._own != src:
                data.copy_(self._control.incoming.pop(0))

        return run

    def _transfer(self, outgoing: Pieces, incoming: Pieces) -> Move:
        sent = {member: data for data, member in outgoing}
        if sum(member not in sent for _, member in incoming) > len(self._control.incoming):
            raise InvalidArgumentError("a recording group cannot gather values beyond 4 KiB on one rank")

        def run() -> None:
            for data, member in incoming:
                data.copy_(sent[member] if member in sent else self._control.incoming.pop(0))

        return run


class _FakePlanes(Planes):
    """The operations of a recording group."""

    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Move:
        own = self.own

        def run() -> None:
            for data in (*incoming[:own], *incoming[own + 1 :]):
                data.copy_(outgoing[own])

        return run


class _RecordingComm(Comm):
    """A comm that records its calls, and does not communicate."""

    def __init__(self, rank: int, control: _FakeControl) -> None:
        planes = _FakePlanes([_FakePlane(control)], control.size, control.rank)
        super().__init__(control, planes, device=torch.device("cpu"))
        self._global_rank = rank
        self._fake = control

    def new_group(self, ranks: Sequence[int]) -> Comm:
        control = _FakeControl(self._global_rank, tuple(ranks), self._fake.calls, self._fake.replies)
        return self.add_child(_RecordingComm(self._global_rank, control))


@contextmanager
def recording(*, rank: int = 0, world_size: int = 2, replies: Iterable[object] = ()) -> Iterator[RecordingGroup]:
    """Make a session current that records its collectives; this process is one of its ranks, and the others are fake.

    Local. Results are as if every rank passed the same values as this one.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        replies: The values that other ranks send when `broadcast` or `scatter` is called with another `src`, in the
            order of the calls.

    Raises:
        InvalidArgumentError: `rank` or `world_size` is out of range, or `replies` is not an iterable of values.

    Example:
        >>> import rankwise
        >>> from rankwise.testing.fakes import recording
        >>> with recording(rank=1, world_size=4) as group:
        ...     rankwise.all_reduce(2.0), rankwise.get_rank()
        (8.0, 1)
        >>> group.calls[0].operation
        'all_reduce'
    """
    rank, world_size = _checked(rank, world_size)
    if isinstance(replies, (str, bytes)) or not isinstance(replies, Iterable) or getattr(replies, "ndim", 1) == 0:
        raise InvalidArgumentError(f"replies={shown(replies)} is not an iterable of the values that other ranks send")
    calls: list[Recorded] = []
    comm = _RecordingComm(rank, _FakeControl(rank, range(world_size), calls, iter(replies)))
    reading = read_environment(environ=fake_torchrun(world_size)[rank])
    with _as_current(SessionState(reading, comm=comm, device=comm.device)):
        yield RecordingGroup(comm, calls)


@contextmanager
def fake_group(*, rank: int = 0, world_size: int = 2) -> Iterator[Session]:
    """Open torch's fake process group, of any size, in a session: collectives return at once, with arbitrary values.

    Local. For tests of logic that uses torch.distributed itself, and of the cost of a call in a world of thousands.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.

    Raises:
        InvalidArgumentError: `rank` or `world_size` is out of range.

    Example:
        >>> from rankwise.testing.fakes import fake_group
        >>> with fake_group(rank=5, world_size=4096) as session:
        ...     session.rank, session.world_size
        (5, 4096)
    """
    rank, world_size = _checked(rank, world_size)
    control = _FakeControl(rank, range(world_size), [], iter(()))
    control.num_combined = 1  # so that a call costs the same in every world
    comm = _RecordingComm(rank, control)
    reading = read_environment(environ=fake_torchrun(world_size)[rank])
    with _torch.fake_process_group(rank, world_size):
        state = SessionState(reading, comm=comm, device=comm.device, group=dist.group.WORLD, backend="fake")
        with _as_current(state):
            yield Session(state)


def _checked(rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank and a world size, checked.

    Raises:
        InvalidArgumentError: One of them is not an integer, or is out of range.
    """
    size, checked_rank = as_integer(world_size, "world_size"), as_integer(rank, "rank")
    if not 1 <= size <= MAX_RANKS:
        raise InvalidArgumentError(f"world_size={shown(world_size)} is not a number of ranks from 1 to {MAX_RANKS}")
    if not 0 <= checked_rank < size:
        raise InvalidArgumentError(f"rank={shown(rank)} is not one of world_size={size} ranks")
    return checked_rank, size


@contextmanager
def _as_current(session: SessionState) -> Iterator[None]:
    before = opened_session()
    reset_current()
    set_current(session)
    try:
        yield
    finally:
        reset_current()
        if before is not None:
            set_current(before)
