"""Members of a group as threads of this process, each with connections and a channel of its own."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from rankwise._comm.control.channel import Channel
from rankwise._comm.control.hosts_channel import HostsChannel
from rankwise._comm.control.links.connect import connect as connect_ranks
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.protocol import Description, Frame, FrameKind
from rankwise._comm.control.socket_channel import SocketChannel
from rankwise._comm.control.verdict import Verdict
from rankwise.errors import RemoteRankError

SIZE = 3
RANKS = range(10, 10 + SIZE)
CALL = "all_reduce at train.py:88"


@dataclass
class Member:
    """One member: the connections of its rank, and the channel of the group."""

    links: Links
    channel: Channel

    def leave(self, reason: str) -> None:
        """Leave the group, and close everything."""
        self.channel.close(reason)
        self.links.close()


def in_threads(fn: Callable[[int], Any], size: int = SIZE) -> list[Any]:
    """Call a function for each group rank at once, in a thread of its name; return results or exceptions."""
    results: list[Any] = [None] * size

    def run(group_rank: int) -> None:
        try:
            results[group_rank] = fn(group_rank)
        except Exception as error:  # noqa: BLE001 - it is the result
            results[group_rank] = error

    threads = [
        threading.Thread(target=run, args=(group_rank,), name=str(group_rank), daemon=True)
        for group_rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    return results


def connect(group_rank: int, store: Store, size: int = SIZE, **replaced: Any) -> Links:
    """Connect a rank of a session of ranks 10, 11, ...; `replaced` are arguments of `connect`."""
    arguments: dict[str, Any] = {
        "one_host": False,
        "own_address": lambda: "127.0.0.1",
        "timeout": 100.0,
        "check_alive": lambda _: None,
    }
    arguments |= replaced
    return connect_ranks(store=store, ranks=range(10, 10 + size), rank=10 + group_rank, **arguments)


def open_group(links: list[Links], group: int = 0, ranks: Collection[int] = RANKS) -> list[Member]:
    """Return the members of a group of some ranks. One after the other: processes lock the page, threads do not."""
    members = []
    for own in links:
        if own.rank in ranks:
            here = [] if own.page is None else [rank for rank in ranks if rank in own.page.ranks]
            if own.page is not None and len(here) == len(ranks):
                channel: Channel = PageChannel(group, list(ranks), own, own.page)
            elif own.page is not None and len(here) > 1:
                channel = HostsChannel(group, list(ranks), own, own.page)
            else:
                channel = SocketChannel(group, list(ranks), own)
            members.append(Member(own, channel))
    return members


def agree(member: Member, body: bytes = b"", *, timeout: float = 100.0, read: Collection[int] = ()) -> Verdict:
    """Take part in an exchange of equal calls, without looking for deadlocks."""
    call = Description("all_reduce", site="train.py:88")
    verdict = member.channel.agree(call, body, read=read, timeout=timeout, on_pause=lambda _: None)
    if verdict.error is not None:
        raise verdict.error
    return verdict


def assert_connected(members: list[Member]) -> None:
    """Check that every member receives the body of every member."""

    def exchanged(group_rank: int) -> dict[int, bytes]:
        return dict(agree(members[group_rank], b"%d" % group_rank, read=range(len(members))).bodies)

    wanted = {group_rank: b"%d" % group_rank for group_rank in range(len(members))}
    assert in_threads(exchanged, len(members)) == [wanted] * len(members)


def failed(member: Member, raised: str = "ValueError: bad batch", traceback: str = "trace") -> Frame:
    """Return the frame of a member that has raised."""
    rank = member.channel.ranks[member.channel.own]
    error = RemoteRankError(rank=rank, host="node", raised=raised, traceback=traceback)
    return Frame(FrameKind.FAILED, CALL, body=pickle.dumps(error))
