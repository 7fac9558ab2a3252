"""The connections between the members of a group, one from each to each, and the exchange of frames over them.

Frames do not go through the process group. A connection of its own to each member tells who is missing, notices at
once that one has died, is waited for in a way that Ctrl-C ends, is not in the way of the program's own collectives, and
costs a tenth of gloo's time. See docs/decisions/0008-frames-on-connections-of-their-own.md.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from rankwise._comm.control.peer import Peer
from rankwise._comm.control.protocol import Frame, FrameKind, bulk_head
from rankwise._net.polling import READABLE, WRITABLE, poll
from rankwise.errors import CollectiveError, CollectiveTimeoutError

# How long one wait is, so that Ctrl-C is heard and other groups are looked at.
SLICE_SECONDS: Final = 0.5
_FIRST_SLICE_SECONDS: Final = 0.05
# How long to look for further losses: a member that hangs up because of another's end is often heard before that.
_LOSS_SECONDS: Final = 0.1
# How much may wait for a member that does not read it, before whoever says more waits too.
_MOST_UNSENT_BYTES: Final = 1 << 20

_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """The connections of one member to the others.

    Attributes:
        name: The group's, the same on all members.
        ranks: The members' global ranks, by place.
        sequence: The number of the last exchange that this member entered.
        lock: Held by a thread that is at the connections: one that looks here from another group must not take what is
            meant for it.
        near: All members are on this host: no names of `hosts` are given, by rank.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], connections: Mapping[int, socket.socket], hosts: Mapping[int, str]
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.sequence = 0
        self.lock = threading.Lock()
        self.near = not hosts
        self._call = ""
        self._peers = {
            place: Peer(ranks[place], hosts.get(ranks[place], ""), connection)
            for place, connection in connections.items()
        }
        for connection in connections.values():
            connection.setblocking(False)
        _open_meshes.add(self)

    def exchange_frames(
        self, frame: Frame, bodies: Sequence[bytes], *, timeout: float, on_pause: Callable[[Sequence[int]], None]
    ) -> dict[int, Frame]:
        """Send a frame to every member, with the body for its place, and return all of them by place.

        As soon as one tells of a failure the others are not waited for.

        Args:
            frame: What this member says. Its sequence number is given here.
            bodies: One for each place.
            timeout: Seconds to wait for the others.
            on_pause: Called with the ranks that have not come, while waiting.

        Raises:
            CollectiveError: A member is gone.
            CollectiveTimeoutError: Some did not come in time, or another member waited too long.
        """
        with self.lock:
            self.sequence += 1
            own = replace(frame, sequence=self.sequence)
            self._call = own.call
            for place, peer in self._peers.items():
                peer.forget_before(self.sequence)
                peer.post(own.encode(bodies[place]))
                if self.sequence in peer.frames:
                    peer.receive()  # it came long ago, and may have given up since
            self._await_frames(own, timeout=timeout, on_pause=on_pause)
            frames = {place: peer.frames.pop(own.sequence, None) for place, peer in self._peers.items()}
            mine = {place: replace(own, body=bodies[place]) for place in range(len(self.ranks)) if place not in frames}
            return mine | {place: frame for place, frame in frames.items() if frame is not None}

    def say(self, frame: Frame) -> None:
        """Send a frame to every member, and wait for nothing."""
        for peer in self._peers.values():
            peer.post(frame.encode())

    def skip(self, frame: Frame, *, timeout: float | None = None) -> None:
        """Take part in the next exchange with a frame, and do not wait for the others'.

        What they have said meanwhile is read, for members that only skip would fill their connections else.

        Args:
            frame: What this member says.
            timeout: Seconds to wait for a member that reads nothing, once much was said to it; None to say more still.

        Raises:
            CollectiveTimeoutError: It has read nothing for that long.
        """
        self.sequence += 1
        for peer in self._peers.values():
            peer.receive()
            peer.forget_before(self.sequence)
        self.say(replace(frame, sequence=self.sequence))
        start = time.monotonic()
        while timeout is not None and (
            slow := [peer.name for peer in self._peers.values() if len(peer.outbox) > _MOST_UNSENT_BYTES]
        ):
            if time.monotonic() - start > timeout:
                raise CollectiveTimeoutError(f"{frame.call}: {', '.join(slow)} took nothing in for {timeout:g} s")
            self._talk(SLICE_SECONDS)

    def waiting(self, rank: int) -> Frame | None:
        """Return the call that a member has made here and this rank has not, if there is one. Does not wait."""
        peer = next((peer for peer in self._peers.values() if peer.rank == rank), None)
        if peer is None:
            return None
        peer.receive()
        frame = peer.frames.get(self.sequence + 1)
        return frame if frame is not None and frame.kind is FrameKind.CALL and not peer.lost else None

    def transfer(
        self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview], *, timeout: float
    ) -> None:
        """Send data to members by place, and fill memory with theirs, after an exchange; both know the lengths.

        Raises:
            CollectiveError: A member is gone.
            CollectiveTimeoutError: Nothing moved for that long.
        """
        with self.lock:
            self._transfer(outgoing, incoming, timeout)

    def _transfer(self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview], timeout: float) -> None:
        left, room = dict(outgoing), dict(incoming)
        for place, data in outgoing.items():
            self._peers[place].post(bulk_head(len(data)))
        begun: set[int] = set()
        since, lost_since = time.monotonic(), 0.0
        while left or room:
            if self._send_some(left) or self._receive_some(room, begun):
                since = time.monotonic()
                continue
            lost = [self._peers[place] for place in left.keys() | room.keys() if self._peers[place].lost]
            if lost and time.monotonic() - (lost_since := lost_since or time.monotonic()) > _LOSS_SECONDS:
                raise CollectiveError(_lost(self._call, lost))
            if time.monotonic() - since > timeout:
                slow = ", ".join(self._peers[place].name for place in sorted(left.keys() | room.keys()))
                raise CollectiveTimeoutError(f"{self._call}: no data from or to {slow} for {timeout:g} s")
            events = dict.fromkeys(room, READABLE)
            for place in left:
                events[place] = events.get(place, 0) | WRITABLE
            self._poll(_LOSS_SECONDS if lost else SLICE_SECONDS, events)

    def dead_ranks(self, ranks: Container[int] | None = None) -> str:
        """Return which members, of these ranks or of all, are gone and why; "" if none is. Does not wait."""
        peers = [peer for peer in self._peers.values() if ranks is None or peer.rank in ranks]
        for peer in peers:
            peer.receive()
        return "; ".join(f"{peer.name} {peer.lost}" for peer in peers if peer.lost)

    def close(self, reason: str) -> None:
        """Tell the others why this rank takes part no more, and hang up."""
        farewell = Frame(FrameKind.LEFT, self.sequence, reason).encode()
        for peer in self._peers.values():
            if not peer.midway:  # else it would be taken for data
                peer.post(farewell)
        self.abandon()

    def abandon(self) -> None:
        """Hang up, and say nothing."""
        for peer in self._peers.values():
            peer.end("was left by this rank")
            peer.connection.close()

    def _await_frames(self, own: Frame, *, timeout: float, on_pause: Callable[[Sequence[int]], None]) -> None:
        start = time.monotonic()
        peers = self._peers.values()
        while True:
            heard = [peer.frames.get(own.sequence) for peer in peers]
            late = [peer for peer, frame in zip(peers, heard, strict=True) if frame is None]
            told = next((text for peer in peers if (text := peer.gave_up.get(own.sequence))), None)
            if told is not None:
                raise CollectiveTimeoutError(told)
            if not late and not any(peer.outbox for peer in peers):
                return
            if any(frame is not None and frame.kind is FrameKind.FAILED for frame in heard):
                return
            if any(peer.lost for peer in late):
                self.dead_ranks()  # one that left because of another says so: hear all of them
                raise CollectiveError(_lost(own.call, [peer for peer in late if peer.lost]))
            waited = time.monotonic() - start
            if waited > timeout:
                missing = "; ".join(peer.seen for peer in late)
                text = f"{own.call}: not all ranks came within {timeout:g} s. Missing: {missing}"
                self.say(replace(own, kind=FrameKind.GAVE_UP, call=text, body=b""))
                raise CollectiveTimeoutError(text)
            pause = min(max(_FIRST_SLICE_SECONDS, waited), SLICE_SECONDS)
            if not self._talk(min(pause, timeout - waited + 0.001)):
                on_pause([peer.rank for peer in late])

    def _talk(self, timeout: float) -> bool:
        """Wait until frames can be sent or received, and do so; False if none could be."""
        events = {
            place: (0 if peer.sends_data or peer.is_ahead else READABLE) | (WRITABLE if peer.outbox else 0)
            for place, peer in self._peers.items()
        }
        ready = self._poll(timeout, events)
        for peer, event in ready:
            if event & WRITABLE:
                peer.flush()
            if event & ~WRITABLE:
                peer.receive()
        return bool(ready)

    def _poll(self, timeout: float, events: Mapping[int, int]) -> list[tuple[Peer, int]]:
        """Wait until something can be sent or received."""
        peers: dict[int, Peer] = {}
        wanted: dict[int, int] = {}
        for place, event in events.items():
            peer = self._peers[place]
            if not peer.lost:
                descriptor = peer.connection.fileno()
                peers[descriptor], wanted[descriptor] = peer, event
        return [(peers[descriptor], event) for descriptor, event in poll(wanted, timeout)]

    def _send_some(self, left: dict[int, memoryview]) -> int:
        """Send what can be sent now of data, and return how much that was."""
        moved = 0
        for place, data in list(left.items()):
            peer = self._peers[place]
            if peer.outbox:
                peer.flush()
            if peer.outbox or peer.lost:
                continue
            sent = peer.send(data)
            peer.midway = sent < len(data)
            moved += sent
            if sent == len(data):
                del left[place]
            else:
                left[place] = data[sent:]
        return moved

    def _receive_some(self, room: dict[int, memoryview], begun: set[int]) -> int:
        """Receive what there is of data, and return how much that was."""
        moved = 0
        for place, rest in list(room.items()):
            peer = self._peers[place]
            if place not in begun:
                if not peer.begin_data():
                    continue
                begun.add(place)
            received = peer.receive_into(rest)
            moved += received
            if received == len(rest):
                del room[place]
                peer.read_inbox()  # what came behind the data
            else:
                room[place] = rest[received:]
        return moved


@contextmanager
def looking_at(mesh: Mesh | None) -> Iterator[Mesh | None]:
    """Give the connections, or None while another thread is at them."""
    if mesh is None or not mesh.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield mesh
    finally:
        mesh.lock.release()


def _lost(call: str, lost: Sequence[Peer]) -> str:
    who = "; ".join(f"{peer.name} {peer.lost}{f' (last seen in {peer.last})' if peer.last else ''}" for peer in lost)
    return f"{call} broke off: {who}"


def _abandon_all() -> None:
    """Let go of the connections in a forked child: only the end of the rank itself may end them."""
    for mesh in _open_meshes:
        mesh.abandon()


os.register_at_fork(after_in_child=_abandon_all)
