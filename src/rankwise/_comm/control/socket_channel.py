"""A channel over connections alone: the exchanges of a member that shares no page with another one.

For a rank alone on its host, for ranks that are threads of one process, and where a host has no page.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import Final

from rankwise._comm.control.branch import Branch
from rankwise._comm.control.calls import Calls, bodies_of
from rankwise._comm.control.channel import Channel, Part
from rankwise._comm.control.flow import SLICE_SECONDS
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.protocol import Frame, FrameKind
from rankwise._comm.control.verdict import Outcome, Verdict
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise.errors import CollectiveTimeoutError

# With more unsent bytes than this for one leader, posting a frame waits for it.
_MAX_UNSENT_BYTES: Final = 1 << 20


class SocketChannel(Channel):
    """The exchanges of one group, for a member that is a unit of its own."""

    def __init__(self, group: int, ranks: Sequence[int], links: Links) -> None:
        super().__init__(group, ranks, links)
        self._branch = Branch(self, links)
        self._is_on_one_host = len(set(map(links.host, ranks))) == 1
        self._frame = Frame(FrameKind.CALL, "")

    @property
    def same_host(self) -> bool:
        return self._is_on_one_host

    def post(self, frame: Frame, *, timeout: float | None = None) -> None:
        self.require_open(frame.call)
        self._enter(frame)
        self._branch.post_failure(frame)
        start = time.monotonic()
        while timeout is not None and (slow := self._branch.unread(_MAX_UNSENT_BYTES)):
            if elapsed_since(start) > timeout:
                raise CollectiveTimeoutError(f"{frame.call}: {', '.join(slow)} read nothing for {timeout:g} s")
            self.require_open(frame.call)
            self._branch.wait(self._links.loop.num_events, min(SLICE_SECONDS, timeout))

    def pending_calls(self, ranks: Container[int]) -> list[Frame]:
        return self._branch.pending_calls(ranks)

    def unit_frames(self) -> dict[int, Frame]:
        return {self.own: self._frame}

    def lost_reason(self, member: int) -> str:
        return "" if member == self.own else self._branch.lost_reason(member)

    def _arrivals_at(self, sequence: int) -> list[float]:
        return self._branch.arrivals_at(sequence)

    def _leave(self, reason: str) -> None:
        self._branch.leave(reason)

    def _free(self) -> None:
        self._branch.forget(self.sequence + 1)
        self._links.leave_group(self.group)

    def _exchange(self, part: Part) -> Verdict:
        self._branch.begin(part)
        self._enter(part.frame)
        own = [Calls.of(self.own, part.frame)]
        wait = self._branch.wait
        verdict, calls = self._branch.run(part, lambda: own, lambda seen, seconds, _: wait(seen, seconds))
        if verdict.outcome is Outcome.AGREED and part.read:
            bodies = bodies_of(calls, len(self.ranks))
            verdict.bodies = {member: bodies[member] for member in part.read}
        self._branch.finish(part, verdict, calls)
        return verdict

    def _enter(self, frame: Frame) -> None:
        self.sequence += 1
        self.call = frame.call
        frame.group, frame.sequence = self.group, self.sequence
        self._frame = frame

    def _refresh(self) -> None:
        self._branch.refresh()

    def _entered(self, member: int) -> tuple[str, int, float] | None:
        return self._branch.entered(member)
