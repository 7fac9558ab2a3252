"""The connections between the members of a group, one from each member to each other, and the exchange of frames.

Frames do not go through the process group. With a connection to each member, a rank knows which ranks are missing and
notices a death at once, Ctrl-C ends every wait, the program's own collectives are not disturbed, and an exchange takes
a tenth of gloo's time. See docs/decisions/0008-frames-on-connections-of-their-own.md.
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
from rankwise._comm.control.protocol import Frame, FrameKind, data_header
from rankwise._net.polling import READABLE, WRITABLE, poll
from rankwise.errors import CollectiveError, CollectiveTimeoutError

# The longest single wait. Between waits, signal handlers run (Ctrl-C) and deadlocks between groups are detected.
SLICE_SECONDS: Final = 0.5
_FIRST_SLICE_SECONDS: Final = 0.05
# After a lost connection, wait so long for others: the member that left because another died may be noticed first.
_LOSS_SECONDS: Final = 0.1
# With more unsent bytes than this for one member, posting a frame waits for that member.
_MAX_UNSENT_BYTES: Final = 1 << 20

_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """The connections of one member to the others.

    Attributes:
        name: The name of the group, the same on all members.
        ranks: The global ranks of the members, by group rank.
        sequence: The number of the last exchange that this member entered.
        lock: Held by the thread that uses the connections; others must not read the frames that it waits for.
        same_host: All members are on this host; `hosts`, the host names by rank, is empty then.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], connections: Mapping[int, socket.socket], hosts: Mapping[int, str]
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.sequence = 0
        self.lock = threading.Lock()
        self.same_host = not hosts
        self._call = ""
        self._peers = {
            group_rank: Peer(ranks[group_rank], hosts.get(ranks[group_rank], ""), connection)
            for group_rank, connection in connections.items()
        }
        for connection in connections.values():
            connection.setblocking(False)
        _open_meshes.add(self)

    def exchange_frames(
        self, frame: Frame, bodies: Sequence[bytes], *, timeout: float, on_pause: Callable[[Sequence[int]], None]
    ) -> dict[int, Frame]:
        """Send a frame to every member, each with a body of its own, and return all frames by group rank.

        Once a frame reports a failure, those still missing are not waited for, and left out.

        Args:
            frame: The frame of this member. Its sequence number is set here.
            bodies: The body for each group rank.
            timeout: Seconds to wait for the others.
            on_pause: Called with the missing ranks while waiting.

        Raises:
            CollectiveError: A member is gone.
            CollectiveTimeoutError: Some frames did not arrive in time, here or on another member.
        """
        with self.lock:
            self.sequence += 1
            own = replace(frame, sequence=self.sequence)
            self._call = own.call
            for group_rank, peer in self._peers.items():
                peer.discard_before(self.sequence)
                peer.post(own.encode(bodies[group_rank]))
                if self.sequence in peer.frames:
                    peer.receive()  # its frame came early; its timeout may have expired since
            self._await_frames(own, timeout=timeout, on_pause=on_pause)
            frames = {group_rank: peer.frames.pop(own.sequence, None) for group_rank, peer in self._peers.items()}
            mine = {other: replace(own, body=bodies[other]) for other in range(len(self.ranks)) if other not in frames}
            return mine | {group_rank: frame for group_rank, frame in frames.items() if frame is not None}

    def post_frame(self, frame: Frame, *, timeout: float | None = None) -> None:
        """Take part in the next exchange with a frame, without waiting for the frames of the others.

        Frames that have arrived are read: members that only post would otherwise fill each other's connections.

        Args:
            frame: The frame of this member.
            timeout: Seconds to wait for a member that reads nothing, once many bytes wait for it; None never to wait.

        Raises:
            CollectiveTimeoutError: The member has read nothing for that long.
        """
        self.sequence += 1
        for peer in self._peers.values():
            peer.receive()
            peer.discard_before(self.sequence)
        self._post_to_all(replace(frame, sequence=self.sequence))
        start = time.monotonic()
        while timeout is not None and (
            slow := [peer.name for peer in self._peers.values() if len(peer.outbox) > _MAX_UNSENT_BYTES]
        ):
            if time.monotonic() - start > timeout:
                raise CollectiveTimeoutError(f"{frame.call}: {', '.join(slow)} read nothing for {timeout:g} s")
            self._send_and_receive(SLICE_SECONDS)

    def pending_call(self, rank: int) -> Frame | None:
        """Return the call that a member has made here and this rank has not; None if there is none. Does not wait."""
        peer = next((peer for peer in self._peers.values() if peer.rank == rank), None)
        if peer is None:
            return None
        peer.receive()
        frame = peer.frames.get(self.sequence + 1)
        return frame if frame is not None and frame.kind is FrameKind.CALL and not peer.lost_reason else None

    def transfer(
        self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview], *, timeout: float
    ) -> None:
        """Send data to members and fill buffers with theirs, by group rank; both sides know the lengths.

        Raises:
            CollectiveError: A member is gone.
            CollectiveTimeoutError: No byte was sent or received for that long.
        """
        with self.lock:
            unsent, unfilled = dict(outgoing), dict(incoming)
            for group_rank, data in outgoing.items():
                self._peers[group_rank].post(data_header(len(data)))
            started: set[int] = set()
            last_progress, lost_since = time.monotonic(), 0.0
            while unsent or unfilled:
                if self._send_some(unsent) or self._receive_some(unfilled, started):
                    last_progress = time.monotonic()
                    continue
                pending = unsent.keys() | unfilled.keys()
                lost = [self._peers[group_rank] for group_rank in pending if self._peers[group_rank].lost_reason]
                if lost and time.monotonic() - (lost_since := lost_since or time.monotonic()) > _LOSS_SECONDS:
                    raise _lost_error(self._call, lost)
                if time.monotonic() - last_progress > timeout:
                    slow = ", ".join(self._peers[group_rank].name for group_rank in sorted(pending))
                    raise CollectiveTimeoutError(f"{self._call}: no data from or to {slow} for {timeout:g} s")
                events = dict.fromkeys(unfilled, READABLE)
                for group_rank in unsent:
                    events[group_rank] = events.get(group_rank, 0) | WRITABLE
                self._poll(_LOSS_SECONDS if lost else SLICE_SECONDS, events)

    def dead_ranks(self, ranks: Container[int] | None = None) -> str:
        """Return the dead members, of `ranks` or of all, with reasons; "" if none is known. Does not wait."""
        peers = [peer for peer in self._peers.values() if ranks is None or peer.rank in ranks]
        for peer in peers:
            peer.receive()
        return "; ".join(f"{peer.name} {peer.lost_reason}" for peer in peers if peer.lost_reason)

    def close(self, reason: str) -> None:
        """Send the others the reason why this rank leaves, and close the connections."""
        frame = Frame(FrameKind.LEFT, self.sequence, reason).encode()
        for peer in self._peers.values():
            if not peer.is_partly_sent:  # the peer would read the frame as the rest of its data
                peer.post(frame)
        self.abandon()

    def abandon(self) -> None:
        """Close the connections without a frame."""
        for peer in self._peers.values():
            peer.mark_lost("was left by this rank")
            peer.connection.close()

    def _await_frames(self, own: Frame, *, timeout: float, on_pause: Callable[[Sequence[int]], None]) -> None:
        """Wait until every member's frame of this exchange is here, or one of them ends the exchange."""
        start = time.monotonic()
        peers = self._peers.values()
        while True:
            frames = [peer.frames.get(own.sequence) for peer in peers]
            late = [peer for peer, frame in zip(peers, frames, strict=True) if frame is None]
            # A timeout on one member ends the exchange for all, even for one that has all frames by now: if it went on
            # to its data, it would wait for the member that has raised.
            expired = next((text for peer in peers if (text := peer.timeouts.get(own.sequence))), None)
            if expired is not None:
                raise CollectiveTimeoutError(expired)
            # Frames that are not sent completely are waited for as well: nothing else would send the rest of them.
            if not late and not any(peer.outbox for peer in peers):
                return
            # A failed rank is reported before a lost one: it may exit because of its failure, and that is the cause.
            if any(frame is not None and frame.kind is FrameKind.FAILED for frame in frames):
                return
            if any(peer.lost_reason for peer in late):
                self.dead_ranks()  # reads the connections of all, for a member that left because of another one
                raise _lost_error(own.call, [peer for peer in late if peer.lost_reason])
            waited = time.monotonic() - start
            if waited > timeout:
                missing = "; ".join(peer.name_and_last_call for peer in late)
                text = f"{own.call}: not all ranks came within {timeout:g} s. Missing: {missing}"
                self._post_to_all(replace(own, kind=FrameKind.TIMED_OUT, call=text, body=b""))
                raise CollectiveTimeoutError(text)
            # Short waits first, so that a deadlock is detected soon; longer ones later, so that hours cost little.
            pause = min(max(_FIRST_SLICE_SECONDS, waited), SLICE_SECONDS)
            if not self._send_and_receive(min(pause, timeout - waited + 0.001)):
                on_pause([peer.rank for peer in late])

    def _post_to_all(self, frame: Frame) -> None:
        for peer in self._peers.values():
            peer.post(frame.encode())

    def _send_and_receive(self, timeout: float) -> bool:
        """Wait until bytes of frames can be sent or received, and do so; False if the timeout expired."""
        events = {
            group_rank: (0 if peer.is_sending_data or peer.is_too_far_ahead else READABLE)
            | (WRITABLE if peer.outbox else 0)
            for group_rank, peer in self._peers.items()
        }
        ready = self._poll(timeout, events)
        for peer, event in ready:
            if event & WRITABLE:
                peer.flush()
            if event & ~WRITABLE:
                peer.receive()
        return bool(ready)

    def _poll(self, timeout: float, events: Mapping[int, int]) -> list[tuple[Peer, int]]:
        """Wait until one of the events, by group rank, has happened."""
        peers: dict[int, Peer] = {}
        wanted: dict[int, int] = {}
        for group_rank, event in events.items():
            peer = self._peers[group_rank]
            if not peer.lost_reason:
                descriptor = peer.connection.fileno()
                peers[descriptor], wanted[descriptor] = peer, event
        return [(peers[descriptor], event) for descriptor, event in poll(wanted, timeout)]

    def _send_some(self, unsent: dict[int, memoryview]) -> int:
        """Send as much data as the connections can take now, and return the number of bytes."""
        moved = 0
        for group_rank, data in list(unsent.items()):
            sent = self._peers[group_rank].send_data(data)
            moved += sent
            if sent == len(data):
                del unsent[group_rank]
            else:
                unsent[group_rank] = data[sent:]
        return moved

    def _receive_some(self, unfilled: dict[int, memoryview], started: set[int]) -> int:
        """Receive the data that has arrived, and return the number of bytes."""
        moved = 0
        for group_rank, rest in list(unfilled.items()):
            peer = self._peers[group_rank]
            if group_rank not in started:
                if not peer.start_data():
                    continue
                started.add(group_rank)
            received = peer.receive_into(rest)
            moved += received
            if received == len(rest):
                del unfilled[group_rank]
                peer.parse_inbox()  # frames may follow the data
            else:
                unfilled[group_rank] = rest[received:]
        return moved


@contextmanager
def try_lock(mesh: Mesh | None) -> Iterator[Mesh | None]:
    """Hold the lock of a mesh in a block, and give the mesh; None while another thread holds the lock."""
    if mesh is None or not mesh.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield mesh
    finally:
        mesh.lock.release()


def _lost_error(call: str, lost: Sequence[Peer]) -> CollectiveError:
    seen = [f" (last seen in {peer.last_call})" if peer.last_call else "" for peer in lost]
    reasons = "; ".join(f"{peer.name} {peer.lost_reason}{last}" for peer, last in zip(lost, seen, strict=True))
    return CollectiveError(f"{call} failed: {reasons}")


def _abandon_all() -> None:
    """Close the connections in a forked child: only the end of the rank itself may end them."""
    for mesh in _open_meshes:
        mesh.abandon()


os.register_at_fork(after_in_child=_abandon_all)
