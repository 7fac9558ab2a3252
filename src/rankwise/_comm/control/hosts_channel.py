"""A channel through the pages of several hosts, whose leaders form a tree.

On each host it works as for a group of that host alone, until the leader would find the verdict: then it takes part in
an exchange with the leaders of the other hosts, and publishes the verdict of all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Final

import torch

from rankwise._comm.control.branch import Branch, State
from rankwise._comm.control.calls import Calls, bodies_of, decode_calls, encode_calls
from rankwise._comm.control.channel import Channel, Part
from rankwise._comm.control.exchange import GRACE_SECONDS
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.page.host_page import HostPage
from rankwise._comm.control.page_channel import PageChannel
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.control.verdict import Outcome, Verdict
from rankwise.errors import RankwiseError

# After a verdict and the calls of all members: the length of the verdict.
_LENGTH: Final = struct.Struct("<Q")
# How long a leader may take after a timeout: it waits for the root.
_LEADER_SECONDS: Final = GRACE_SECONDS + 1.0
_CALLS: Final = frozenset({FrameKind.CALL, FrameKind.DETAILS})


class HostsChannel(PageChannel):
    """The exchanges of one group whose members are on several hosts, for a member that shares the page of its host."""

    _leader_seconds = _LEADER_SECONDS

    def __init__(self, group: int, ranks: Sequence[int], links: Links, page: HostPage) -> None:
        super().__init__(group, ranks, links, page)
        self._spin_seconds = 0.0  # a verdict of other hosts takes longer than that
        self._branch = Branch(self, links)
        self._all_calls: Sequence[Calls] = ()  # of the exchange that has ended, if a member of this host reads bodies

    @property
    def same_host(self) -> bool:
        return False

    def transfer(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], *, timeout: float
    ) -> Callable[[], None]:
        return Channel.transfer(self, outgoing, incoming, timeout=timeout)

    def pending_calls(self, ranks: Container[int]) -> list[Frame]:
        return super().pending_calls(ranks) + self._branch.pending_calls(ranks)

    def lost_reason(self, member: int) -> str:
        return super().lost_reason(member) if member in self._members else self._branch.lost_reason(member)

    def _arrivals_at(self, sequence: int) -> list[float]:
        return self._branch.arrivals_at(sequence)

    def _leave(self, reason: str) -> None:
        super()._leave(reason)
        self._branch.leave(reason)

    def _free(self) -> None:
        self._branch.forget(self.sequence + 1)
        self._links.leave_group(self.group)
        super()._free()

    def _exchange(self, part: Part) -> Verdict:
        self._branch.begin(part)
        verdict = super()._exchange(part)
        self._branch.finish(part, verdict, self._all_calls)
        return verdict

    def _report(self, frame: Frame) -> None:
        verdict = self._branch.post_failure(frame)
        if self._branch.is_leader:
            self._publish(verdict)

    def _lead(self, part: Part) -> Verdict:
        verdict, self._all_calls = self._branch.run(part, self._state, self._wait_as_leader)
        self._publish(verdict)
        return verdict

    def _state(self) -> State:
        """Return the calls of the members on this host, or the error of one of them; None to wait."""
        num_arrived = self._window.num_arrived(self.sequence)
        self._window.fence()
        if self.page.dead or self._window.has_problem(self.sequence):
            problem = self._problem()
            if problem is not None:
                return problem
        if num_arrived < self._num_slots:
            return None
        frames = self.unit_frames()
        if any(frame.kind not in _CALLS for frame in frames.values()):
            return None  # a member that waits in another group has written the error on the board
        return [Calls.of(member, frame) for member, frame in frames.items()]

    def _wait_as_leader(self, seen: int, seconds: float, awaits_members: bool) -> bool:
        if not awaits_members:
            return self._branch.wait(seen, seconds)
        num_arrived = self._window.num_arrived(self.sequence)
        return self._sleep(seen, lambda: self._window.has_arrivals(self.sequence, num_arrived), lambda: seconds)

    def _verdict_of_others(self, part: Part) -> Verdict | None:
        if self._is_led():
            return None
        if self._branch.is_due(part):
            self._branch.look(part)
        # Without a leader there is no verdict of the root, and none comes: an error ends the exchange at once. It is
        # written into the page, so that the leader, which may come just now, ends the exchange as well.
        found = self._branch.found()
        if found is not None:
            return found if found.error is None or found.is_final else super()._end_for_all(found.error)
        gone = self._branch.gone()
        return self._end_for_all(self.lost_error(self.call, gone)) if gone else None

    def _is_late(self, part: Part) -> bool:
        # A leader that is there knows more of the others, and ends the exchange first, unless it is stopped.
        return part.is_late and (not self._is_led() or part.waited > part.timeout + part.tolerance + _LEADER_SECONDS)

    def _give_up(self, part: Part) -> Verdict:
        return self._verdict_of_others(part) or super()._give_up(part)

    def _late(self) -> Sequence[int]:
        missing = self._missing()  # lost ones are the cause; also if they had come, and no other one is missing
        return [one for one in missing if self.lost_reason(one)] or missing or self._branch.gone() or super()._late()

    def _end_for_all(self, error: RankwiseError) -> Verdict:
        if not self._is_led():
            self._branch.post_end(error)
        return super()._end_for_all(error)

    def _without_leader(self, problem: Verdict) -> Verdict:
        # Members of other hosts may know as little of this one, which has come, as of those that are lost.
        if problem.error is not None and not problem.is_final:
            self._branch.post_end(problem.error)
        return problem

    def _missing(self) -> list[int]:
        """Return the members that are not known to be in the exchange."""
        return self._branch.missing()

    def _encoded(self, verdict: Verdict) -> bytes:
        is_read = verdict.outcome is Outcome.AGREED and any(one.frame.reads for one in self._all_calls)
        calls = encode_calls(self._all_calls) if is_read else b""
        return verdict.encode() + calls + _LENGTH.pack(len(calls))

    def _decoded(self, body: bytes) -> Verdict:
        (length,) = _LENGTH.unpack_from(body, len(body) - _LENGTH.size)
        end = len(body) - _LENGTH.size - length
        self._all_calls = decode_calls(body[end : end + length])
        return Verdict.decode(body[:end])

    def _bodies(self, members: Collection[int]) -> dict[int, bytes]:
        bodies = bodies_of(self._all_calls, len(self.ranks))
        return {member: bodies[member] for member in members}

    def _refresh(self) -> None:
        super()._refresh()
        self._branch.refresh()

    def _entered(self, member: int) -> tuple[str, int, float] | None:
        return super()._entered(member) if member in self._members else self._branch.entered(member)

    def _last_call(self, member: int) -> str:
        return super()._last_call(member) if member in self._members else self.last_agreed_call

    def _unverified_of(self, member: int) -> int | None:
        return super()._unverified_of(member) if member in self._members else None
