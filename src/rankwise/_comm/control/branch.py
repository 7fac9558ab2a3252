"""The place of one unit in the tree of a group: its leader's exchanges with other leaders, and what is known of these.

What is sent, and what follows from what has arrived, is decided in `exchange`. What cannot wait for a leader that is
late goes over the `board` of the session.
"""

from __future__ import annotations

import pickle
import time
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

from rankwise._comm.control.calls import Calls, merged
from rankwise._comm.control.exchange import Exchange, Inbox
from rankwise._comm.control.flow import LOSS_SECONDS
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.peer import Peer
from rankwise._comm.control.page.layout import ARRIVALS
from rankwise._comm.control.protocol import Frame, FrameKind, read_report
from rankwise._comm.control.tree import Tree
from rankwise._comm.control.verdict import Combine, Outcome, Verdict, conclude
from rankwise.errors import CollectiveError, CollectiveTimeoutError, RankwiseError

if TYPE_CHECKING:
    from rankwise._comm.control.channel import Channel, Part

# The state of a unit in an exchange: the calls of all of its members; an error that ends it; None to wait.
State: TypeAlias = Sequence[Calls] | Verdict | None

# For so long a leader only waits for others: to look for lost ones would take a part of a quick call.
_QUIET_SECONDS: Final = 0.02
# How long a member waits before it looks at the board, and writes there that it waits. Only who has not come when a
# timeout expires is named as missing: so a member waits longer than its timeout for what the others write.
_LOOK_SECONDS: Final = 0.5
_TOLERANCE_SECONDS: Final = 0.7
# After so long the first unit wants to know who is missing, for the notice.
_NAMING_SECONDS: Final = 55.0
# How long before that it looks for the last time: so long the store may take to answer.
_ANSWER_SECONDS: Final = 0.15
# How long the verdict on a call is waited for that a lost rank may have made.
_VERDICT_SECONDS: Final = 1.0
# How long a call of another member is known before a deadlock is looked for: longer than a verdict is on its way.
_PENDING_SECONDS: Final = 1.5


def units_of(ranks: Sequence[int], links: Links) -> list[list[int]]:
    """Return the group ranks of the members of each unit of a group, whose global ranks are given."""
    units: dict[int, list[int]] = {}
    for member, rank in enumerate(ranks):
        units.setdefault(links.unit_of(rank), []).append(member)
    return list(units.values())


class Branch:
    """The units of a group, as one member sees them.

    Attributes:
        members: The group ranks of this unit.
        is_leader: This member leads it.
        is_root: It is the root of the tree.
        waited: How long the last exchange took this member, in seconds.
    """

    def __init__(self, channel: Channel, links: Links) -> None:
        self._channel = channel
        self._links = links
        self._board = links.board
        units = units_of(channel.ranks, links)  # of which those that are no neighbours are forgotten
        self._own = next(number for number, members in enumerate(units) if channel.own in members)
        self.members = units[self._own]
        self.is_leader = self.members[0] == channel.own
        self.is_root = not self._own
        self._tree = Tree(len(units))
        neighbours = self._tree.neighbours(self._own) if self.is_leader else []
        self._leaders = {unit: units[unit][0] for unit in neighbours}
        if self.is_leader:
            links.listen()
        self._inboxes: Mapping[int, Inbox] = {unit: self._peer(unit).inbox(channel.group) for unit in neighbours}
        # How long the last exchange took this member, in seconds; when it ended.
        self.waited = self._ended = 0.0
        # The members' calls of each exchange but the last, and when the exchange before it ended; on the root alone.
        self._arrivals: dict[int, tuple[float, list[tuple[list[range], array[float]]]]] = {}
        # The next exchange, and since when members are known to wait in it.
        self._pending, self._next_pending_look = -1, 0.0
        self._pending_since: dict[int, float] = {}
        self._noted = 0  # the last exchange about which this member has looked at the board, or has written there
        self._has_read = False  # in the exchange that runs
        self._knows_waiting = False  # it has looked there for those who wait
        self._announced: Iterable[int] = ()
        self._next_look = 0.0

    def run(
        self, part: Part, state: Callable[[], State], wait: Callable[[int, float, bool], bool]
    ) -> tuple[Verdict, Sequence[Calls]]:
        """Take part in an exchange as the leader of this unit; return the verdict, and the calls that are known.

        Args:
            part: The part of this member.
            state: Returns the state of the unit.
            wait: Waits for so many seconds, or until something has happened since a number of events; with True, also
                for members of the unit. Returns whether something has.
        """
        for unit in self._inboxes if self.is_root else ():
            self._links.receive(self._peer(unit))  # the end of the exchange may have come behind the calls
        turn = Turn(self, part, state)
        while True:
            seen = self._links.loop.num_events
            self._channel.require_open(part.frame.call)
            verdict = turn.step()
            # Frames that are not sent completely are waited for as well: nothing else would send the rest of them.
            if verdict is not None and (verdict.outcome is Outcome.ERROR or part.is_late or not self.unread()):
                return verdict, turn.exchange.calls
            if not wait(seen, turn.pause, turn.exchange.awaits_own) and verdict is None:
                self._channel.wait_longer(part, self.missing(turn.exchange.calls))

    def exchange(self, combine: Combine | None) -> Exchange:
        """Begin an exchange with the leaders of other units."""
        channel = self._channel
        for inbox in self._inboxes.values():
            inbox.discard_before(channel.sequence)
        return Exchange(
            channel.group,
            channel.sequence,
            ranks=channel.ranks,
            unit=self._own,
            tree=self._tree,
            inboxes=self._inboxes,
            combine=combine,
        )

    def send(self, exchange: Exchange) -> None:
        """Send what an exchange has to be sent, without waiting."""
        for unit, frame in exchange.take_outgoing():
            self._peer(unit).post(frame)

    def begin(self, part: Part) -> None:
        """Begin to take part in an exchange, as a leader or another member."""
        part.frame.reads, part.frame.waited = bool(part.read), self.waited
        part.tolerance = _TOLERANCE_SECONDS if self.is_root else 2 * _TOLERANCE_SECONDS
        self._has_read, self._knows_waiting, self._announced = False, False, ()
        self._next_look = _LOOK_SECONDS

    def is_due(self, part: Part) -> bool:
        """Return whether a member has waited so long that it looks at the board."""
        return part.waited >= self._next_look

    def until_look(self, part: Part) -> float:
        """Return the seconds until a member looks at the board."""
        return max(0.0, self._next_look - part.waited) + 0.001

    def look(self, part: Part) -> None:
        """Look at the board, and write there who waits in this unit. What has come is known after a moment."""
        channel, waited = self._channel, part.waited
        self._has_read, self._noted = True, channel.sequence
        last = part.timeout + part.tolerance - _ANSWER_SECONDS
        self._next_look = min(waited + _LOOK_SECONDS, last) if waited < last else waited + _LOOK_SECONDS
        frames = channel.unit_frames()
        if channel.own == min(frames, default=-1) and frames.keys() != set(self._announced):
            self._announced = list(frames)
            waiting = [
                Calls.of(member, replace(frame, kind=FrameKind.WAITING, body=b"", waited=waited))
                for member, frame in frames.items()
                if frame.kind in (FrameKind.CALL, FrameKind.DETAILS)
            ]
            self._board.post_waiting(channel.group, channel.sequence, merged(waiting))
        self._board.look(channel.group, channel.sequence)
        if waited > part.timeout or (self.is_root and not self._knows_waiting and waited > _NAMING_SECONDS):
            self._knows_waiting = True
            for sequence in self._sequences_come():
                self._board.look_for_waiting(channel.group, sequence)

    def found(self) -> Verdict | None:
        """Return the error that another unit has written on the board, as of the last look.

        It is final if it is of a member that has failed; otherwise a verdict of the root comes before it.
        """
        ended: Verdict | None = None
        for calls in self._board.ends(self._channel.group, self._channel.sequence) if self._has_read else ():
            if calls.kind is FrameKind.VERDICT:
                return Verdict.decode(calls.bodies[0])
            if calls.kind is FrameKind.ENDED and ended is None:
                ended = Verdict(Outcome.ERROR, error=read_report(calls.bodies[0]))
        return ended

    def pending_calls(self, ranks: Container[int]) -> list[Frame]:
        """Return the calls that members of other units, of these ranks, have made and this one has not.

        They have waited in them for long: only then it is certain that the exchange before is over for all members.
        """
        channel, now = self._channel, time.monotonic()
        sequence, all_ranks = channel.sequence + 1, channel.ranks
        if sequence != self._pending:
            self._pending, self._next_pending_look, self._pending_since = sequence, now, {}
        if now >= self._next_pending_look and any(rank in ranks for rank in all_ranks):
            for member in self._waiting_still(sequence):
                self._pending_since.setdefault(member, now)
            self._next_pending_look = now + _LOOK_SECONDS
        since = [member for member, first in self._pending_since.items() if now - first >= _PENDING_SECONDS]
        pending = [member for member in since if all_ranks[member] in ranks and member not in self.members]
        waiting = self.waiting(sequence) if pending else {}
        frames = [waiting[member].frame for member in pending if not self.lost_reason(member)]
        return [replace(frame, kind=FrameKind.CALL, group=channel.group, sequence=sequence) for frame in frames]

    def entered(self, member: int) -> tuple[str, int, float] | None:
        """Return the call of a member of another unit, as `Channel._entered`."""
        channel = self._channel
        for sequence in (channel.sequence + 1, channel.sequence) if channel.lock.locked() else (channel.sequence + 1,):
            calls = self._waiting_still(sequence).get(member)
            if calls is not None and not self.lost_reason(member):
                return calls.frame.call, sequence, time.monotonic() - calls.waited[0]
        return None

    def waiting(self, sequence: int) -> dict[int, Calls]:
        """Return the members of other units that wait in an exchange, by group rank, as of the last look."""
        records = self._board.waiting(self._channel.group, sequence)
        return {member: calls for calls in records for member in calls.each()}

    def _waiting_still(self, sequence: int) -> dict[int, Calls]:
        """Return the members of other units that wait in an exchange that has not ended, and ask for another look."""
        self._noted = max(self._noted, sequence)
        self._board.look(self._channel.group, sequence)
        self._board.look_for_waiting(self._channel.group, sequence)
        return {} if self._board.ends(self._channel.group, sequence) else self.waiting(sequence)

    def missing(self, calls: Iterable[Calls] = ()) -> list[int]:
        """Return the members that are not known to be in the exchange; `calls` are those that have come."""
        channel = self._channel
        known = {member for record in calls for member in record.each()}
        known.update(channel.unit_frames(), *map(self.waiting, self._sequences_come()))
        return [member for member in range(len(channel.ranks)) if member not in known]

    def _sequences_come(self) -> tuple[int, int]:
        """Return the exchanges whose members have come to this one: also the next one, if its verdict was lost here."""
        return self._channel.sequence, self._channel.sequence + 1

    def post_failure(self, frame: Frame) -> Verdict:
        """Send the final error to all members that a frame of this one brings, without waiting; and return it."""
        waiting = {member: calls.frame for member, calls in self.waiting(self._channel.sequence).items()}
        frames = waiting | self._channel.unit_frames() | {self._channel.own: frame}
        verdict = conclude(self._channel.ranks, frames, None)
        frame = Frame(FrameKind.VERDICT, "", body=verdict.encode())
        self._post(frame)
        frame.group, frame.sequence = self._channel.group, self._channel.sequence
        for unit, inbox in self._inboxes.items():
            peer = self._peer(unit)
            self._links.receive(peer)  # members that only fail would otherwise fill each other's connections
            inbox.discard_before(self._channel.sequence + 1)
            peer.post(frame)
        return verdict

    def post_end(self, error: RankwiseError) -> None:
        """Write that this member waits no longer."""
        self._post(Frame(FrameKind.ENDED, "", body=pickle.dumps(error)))

    def lost_reason(self, member: int) -> str:
        """Return why a member of another unit takes part in no further exchange, as far as is known."""
        rank = self._channel.ranks[member]
        return self._board.gone(rank, self._channel.group) or self._links.lost_reason(rank)

    def leave(self, reason: str) -> None:
        """Let the members of other units know why this member leaves."""
        if not self._board.has_left:
            self._board.mark_gone(self._channel.ranks[self._channel.own], reason, self._channel.group)

    def finish(self, part: Part, verdict: Verdict, calls: Sequence[Calls] = ()) -> None:
        """End an exchange; `calls` are those that are known."""
        sequence, before = self._channel.sequence, self._ended
        self._ended = time.monotonic()
        self.waited = self._ended - part.start
        if verdict.outcome is not Outcome.AGREED:
            return
        if self._noted:
            self.forget(sequence)
        if self.is_root and self.is_leader:
            # All members have left the exchange before at about the same time; their clocks may differ. When calls are
            # received says less: those that have waited for this member are read at once.
            self._arrivals[sequence - 1] = before, [(record.members, record.waited) for record in calls]
            self._arrivals.pop(sequence - ARRIVALS, None)

    def arrivals_at(self, sequence: int) -> list[float]:
        """Return when each member came to an exchange, of all but the last; [] if that is not known here."""
        if sequence not in self._arrivals:
            return []
        ended, records = self._arrivals[sequence]
        found = [0.0] * len(self._channel.ranks)
        for members, waited in records:
            for member, seconds in zip(chain(*members), waited, strict=True):
                found[member] = ended - seconds
        return found

    def wait(self, seen: int, seconds: float) -> bool:
        """Wait until another leader may have sent something, or has read something; False if none has."""
        return self._links.wait(map(self._peer, self._inboxes), seen, seconds)

    def unread(self, num_bytes: int = 0) -> list[str]:
        """Return the names of the leaders for which more bytes than this wait to be sent."""
        peers = map(self._peer, self._inboxes)
        return [peer.name for peer in peers if peer.num_unsent > num_bytes]

    def refresh(self) -> None:
        """Read what has arrived from other leaders, and which ranks are gone."""
        for unit in self._inboxes:
            self._links.receive(self._peer(unit))
        self._board.look_for_losses()

    def forget(self, sequence: int) -> None:
        """Delete what this member has written about exchanges before `sequence`, which all members have left."""
        self._board.forget(self._channel.group, sequence)
        if self._noted < sequence:
            self._noted = 0

    def _peer(self, unit: int) -> Peer:
        return self._links.peer(self._channel.ranks[self._leaders[unit]])

    def _post(self, frame: Frame) -> None:
        self._noted = self._channel.sequence
        self._board.post_end(self._channel.group, self._channel.sequence, Calls.of(self._channel.own, frame))

    def gone(self) -> list[int]:
        """Return the members that are gone, as of the last look at the board."""
        gone, ranks = self._board.gone_ranks(self._channel.group), self._channel.ranks
        return [member for member in range(len(ranks)) if ranks[member] in gone] if gone else []

    def lost(self, exchange: Exchange) -> list[int]:
        """Return the members of other units that are gone, and because of which an exchange may not end."""
        leaders = map(self._leaders.__getitem__, exchange.blocking())
        lost = {member for member in leaders if self.lost_reason(member)}
        if gone := self.gone():
            come = {member for calls in exchange.calls for member in calls.each()}
            lost.update(set(gone).difference(come, self.members))
        return sorted(lost)

    def lost_error(self, part: Part, lost: Sequence[int]) -> CollectiveError:
        """Return the error of an exchange for which lost members are missing."""
        return self._channel.lost_error(part.frame.call, lost)

    def timeout_error(self, part: Part, exchange: Exchange) -> CollectiveTimeoutError:
        """Return the error of an exchange to which not all members have come in time."""
        missing = self.missing(exchange.calls) or [self._leaders[unit] for unit in exchange.blocking()]
        return self._channel.timeout_error(part, missing)


class Turn:
    """What the leader of a unit does in one exchange, step by step; it does not wait.

    Attributes:
        exchange: The exchange.
        pause: After how many seconds the next step has to follow if nothing happens.
    """

    def __init__(self, branch: Branch, part: Part, state: Callable[[], State]) -> None:
        self.exchange = branch.exchange(part.combine)
        self.pause = 0.0
        self._branch = branch
        self._part = part
        self._state = state
        self._lost_since = -1.0

    def step(self) -> Verdict | None:
        """Handle what has happened, and return the verdict; None while this leader waits."""
        exchange, part, branch = self.exchange, self._part, self._branch
        self._add(self._state())
        waited = part.waited
        verdict = exchange.step(waited)
        branch.send(exchange)
        if verdict is None and exchange.error is None and waited < _QUIET_SECONDS:
            self.pause = _QUIET_SECONDS - waited + 0.001
            return None
        if verdict is None and exchange.error is None:
            lost = branch.lost(exchange)
            is_new = bool(lost) and self._lost_since < 0
            self._lost_since = part.waited if is_new else self._lost_since if lost else -1.0
            if is_new or branch.is_due(part):
                branch.look(part)  # a lost rank may have left because of another one
            self._end_in_vain(lost)
            verdict = exchange.step(part.waited)
            branch.send(exchange)
        if verdict is None and exchange.error is None and self._lost_since < 0:
            self.pause = min(part.pause(), branch.until_look(part))
        else:
            self.pause = LOSS_SECONDS
        return verdict

    def _add(self, state: State) -> None:
        """Add the state of this unit."""
        if not isinstance(state, Verdict):
            if state is not None and self.exchange.awaits_own:
                self.exchange.add_own(state)
        elif state.error is None or state.is_final:
            self.exchange.fail(state)
        else:
            self._end(state.error)

    def _end(self, error: RankwiseError) -> None:
        """End the exchange because a member of this unit waits no longer."""
        if self.exchange.error is None and self.exchange.verdict is None:
            self.exchange.end(error, self._part.waited)
            # A lost rank is written there by another one, see `Witness`.
            if isinstance(error, CollectiveTimeoutError):
                self._branch.post_end(error)

    def _end_in_vain(self, lost: Sequence[int]) -> None:
        """End the exchange if it has come to nothing."""
        exchange, part = self.exchange, self._part
        found = self._branch.found()
        grace = LOSS_SECONDS if exchange.is_root else _VERDICT_SECONDS
        if found is not None:
            if found.error is None or found.is_final:
                exchange.fail(found)
            else:
                exchange.end(found.error, part.waited)
        elif lost and (part.waited - self._lost_since > grace or part.is_late):
            exchange.end(self._branch.lost_error(part, lost), part.waited)
        elif part.is_late:
            self._end(self._branch.timeout_error(part, exchange))
