"""The channel of a group: the exchanges by which its members agree on a call, one after the other.

An exchange takes the frame of every member and gives the same verdict to all. There are three implementations: over the
page of the host, where all members are on it; over the pages of several hosts, whose leaders are connected; and over
connections alone, for a member that shares no page with another one.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from rankwise._comm.buffers import memory_of
from rankwise._comm.control.flow import LOSS_SECONDS, SLICE_SECONDS, Flow
from rankwise._comm.control.links.links import Links
from rankwise._comm.control.links.socket_flow import SocketFlow
from rankwise._comm.control.ongoing_calls import OngoingCall
from rankwise._comm.control.page.layout import ARRIVALS
from rankwise._comm.control.protocol import Description, Frame, FrameKind
from rankwise._comm.control.verdict import Combine, Outcome, Verdict
from rankwise._net.pausable_timeouts import elapsed_since
from rankwise._text import LEFT
from rankwise.errors import CollectiveError, CollectiveTimeoutError

log = logging.getLogger(__name__)

# The first wait of an exchange; later ones grow with the time that this rank has waited.
_FIRST_SLICE_SECONDS: Final = 0.05
# How long a failure of something else may be known before the death of a rank, which is its cause.
_CAUSE_SECONDS: Final = 0.5
# After such a wait the user is told whom this rank waits for, once.
_NOTICE_SECONDS: Final = 60.0
# Of more members than these, what is the same is said once: of a job of 1,024 hosts, a message would be 400 KB.
_NAMED_EACH: Final = 16


@dataclass(slots=True, kw_only=True)
class Part:
    """The part of this member in one exchange: what it contributes, and how long it waits.

    Attributes:
        frame: Its frame.
        combine: Computes the result from the bodies of all members.
        read: The group ranks whose bodies this member reads.
        timeout: Seconds to wait for the others.
        tolerance: Seconds beyond the timeout in which members of other hosts can say that they are there.
        on_pause: Called with the missing global ranks while waiting.
        start: When it began, on the monotonic clock.
        noticed: A long wait was reported.
    """

    frame: Frame
    combine: Combine | None
    read: Collection[int]
    timeout: float
    on_pause: Callable[[Sequence[int]], None]
    tolerance: float = 0.0
    start: float = field(default_factory=time.monotonic)
    noticed: bool = False

    @property
    def waited(self) -> float:
        """The seconds since it began."""
        return elapsed_since(self.start)

    @property
    def is_late(self) -> bool:
        """The member waits no longer."""
        return self.waited > self.timeout + self.tolerance

    def pause(self) -> float:
        """Return the length of the next wait: short at first, so that a deadlock is detected soon."""
        waited = self.waited
        left = self.timeout + self.tolerance - waited
        return min(max(_FIRST_SLICE_SECONDS, waited), SLICE_SECONDS, left + 0.001) if left > 0 else _FIRST_SLICE_SECONDS


class Channel(ABC):
    """The exchanges of one group.

    Attributes:
        group: The id of the group, the same on all members.
        ranks: The global ranks of the members, by group rank.
        own: The group rank of this process.
        sequence: The number of the last exchange that this member entered.
        lock: Held by the thread that is in an exchange, which ends with `release`; others must not read the frames that
            it waits for.
        same_host: All members are on this host.
        call: The text of the last call.
        closed: This member has left the group.
    """

    def __init__(self, group: int, ranks: Sequence[int], links: Links) -> None:
        self.group = group
        self.ranks = ranks
        self.own = ranks.index(links.rank)
        self._unverified = 0
        self.sequence = 0
        self.lock = threading.Lock()
        self.call = ""
        self.closed = False
        self._started = 0.0
        self._calls: deque[tuple[int, str]] = deque(maxlen=ARRIVALS)  # those that all members have come to
        self._freed = False
        self._freeing = threading.RLock()  # also held by threads that are not in an exchange, while they read
        self._links = links
        links.open_channel(group, self)

    @property
    @abstractmethod
    def same_host(self) -> bool: ...

    def agree(
        self,
        call: Description,
        body: bytes,
        *,
        combine: Combine | None = None,
        read: Collection[int] = (),
        timeout: float,
        on_pause: Callable[[Sequence[int]], None],
    ) -> Verdict:
        """Send this member's call, and return the verdict, the same on all members.

        Args:
            call: The call.
            body: The message of this member.
            combine: Computes the result from the messages of all members.
            read: The group ranks whose messages this member needs.
            timeout: Seconds to wait for the others.
            on_pause: Called with the missing global ranks while waiting.

        Raises:
            CollectiveError: A member is gone.
            CollectiveTimeoutError: Some members did not come in time, here or for another member.
        """
        part = Part(frame=call.frame(body=body), combine=combine, read=read, timeout=timeout, on_pause=on_pause)
        recorder = self._links.recorder
        self.lock.acquire()
        try:
            if self.closed:
                self.require_open(call.text)
            self._started = part.start
            number = 0 if recorder is None else recorder.begin(self.group, self.sequence + 1, part.frame.call)
            verdict = self._exchange(part)
            if verdict.outcome is Outcome.AGREED:
                self._calls.append((self.sequence, part.frame.call))
                if recorder is not None:
                    recorder.end(number)
            elif verdict.outcome is Outcome.DIFFERENT:
                details = call.frame(FrameKind.DETAILS, pickle.dumps(call.details()))
                verdict = self._exchange(replace(part, frame=details, read=(), start=time.monotonic()))
        finally:
            self.lock.release()
            if self.closed:
                self._free_if_closed()
        return verdict

    @abstractmethod
    def post(self, frame: Frame, *, timeout: float | None = None) -> None:
        """Take part in the next exchange with a frame, without waiting for the others; the caller holds the lock.

        Args:
            frame: The frame of this member.
            timeout: Seconds to wait for members that read nothing, once many frames wait for them; None never to wait.

        Raises:
            CollectiveTimeoutError: They have read nothing for that long.
        """

    @abstractmethod
    def pending_calls(self, ranks: Container[int]) -> list[Frame]:
        """Return the calls that members, of these ranks, have made here and this rank has not. Does not wait."""

    def dead_ranks(self, ranks: Container[int] | None = None, *, failed: bool = False) -> str:
        """Return the members that are gone, of `ranks` or of all, with reasons; "" if none. Does not wait.

        With `failed`, those that have left the session in order are left out.
        """
        if self.closed:
            return ""
        self._refresh()
        members = [member for member, rank in enumerate(self.ranks) if ranks is None or rank in ranks]
        lost = {member: why for member in members if (why := self.lost_reason(member))}
        return self._with_names({member: f" {why}" for member, why in lost.items() if not (failed and why == LEFT)})

    def arrivals(self) -> list[tuple[str, list[float]]]:
        """Return the last calls, the oldest first, and when each member came, by group rank, on the monotonic clock.

        If they are not all on one host, only the first member knows, of all calls but the last, and as if all members
        ended each call at the same time; the others return []. Any thread may ask.
        """
        with self._freeing:
            calls = [] if self._freed else list(self._calls)
            return [(call, found) for sequence, call in calls if (found := self._arrivals_at(sequence))]

    @abstractmethod
    def _arrivals_at(self, sequence: int) -> list[float]:
        """Return when each member came to an exchange that has ended; [] if that is not known."""

    @abstractmethod
    def unit_frames(self) -> dict[int, Frame]:
        """Return the frames of this exchange of the members that agree with this one through memory, by group rank."""

    @abstractmethod
    def lost_reason(self, member: int) -> str:
        """Return why a member takes part in no further exchange, as far as is known; "" if it does."""

    def transfer(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], *, timeout: float
    ) -> Callable[[], None]:
        """Prepare to send flat uint8 tensors to members and to fill others with theirs, by group rank; none is empty.

        Both sides know the lengths. `timeout` are the seconds after which a transfer without progress fails.
        """
        sent = {self.ranks[member]: memory_of(data) for member, data in outgoing.items()}
        filled = {self.ranks[member]: memory_of(data) for member, data in incoming.items()}
        tensors = [*outgoing.values(), *incoming.values()]

        def run() -> None:
            self._run(lambda: SocketFlow(self._links, self.group, sent, filled), timeout)
            tensors.clear()  # kept until here

        return run

    def _run(self, begin: Callable[[], Flow], timeout: float) -> None:
        """Begin a transfer of data, and run it.

        Raises:
            CollectiveError: A member is gone.
            CollectiveTimeoutError: No byte was sent or received for that long.
        """
        with self.held():
            flow = begin()
            last_progress, lost_since = time.monotonic(), 0.0
            try:
                while flow.pending:
                    self.require_open(self.call)
                    if flow.step() or not flow.pending:
                        last_progress = time.monotonic()
                        continue
                    lost = {rank: why for rank in flow.pending if (why := self._lost_in_group(rank) or flow.lost(rank))}
                    if lost and time.monotonic() - (lost_since := lost_since or time.monotonic()) > LOSS_SECONDS:
                        reasons = "; ".join(f"{self._links.name(rank)} {lost[rank]}" for rank in sorted(lost))
                        raise CollectiveError(f"{self.call} failed: {reasons}")
                    if elapsed_since(last_progress) > timeout:
                        slow = ", ".join(map(self._links.name, sorted(flow.pending)))
                        raise CollectiveTimeoutError(f"{self.call}: no data from or to {slow} for {timeout:g} s")
                    flow.wait(LOSS_SECONDS if lost else SLICE_SECONDS)
            finally:
                flow.end()

    def _lost_in_group(self, rank: int) -> str:
        return self._links.lost_reason(rank) or self.lost_reason(self.ranks.index(rank))

    def ongoing_call(self, rank: int) -> OngoingCall | None:
        """Return the call that a member is in, None if none is known; any thread may ask. Does not wait."""
        with self._freeing:
            if self._freed or rank not in self.ranks:
                return None
            own = (self.call, self.sequence, self._started) if self.lock.locked() else None
            found = own if rank == self.ranks[self.own] else self._entered(self.ranks.index(rank))
        if found is None:
            return None
        text, sequence, started = found
        return OngoingCall(text, self.group, self.ranks, sequence, time.monotonic() - started)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, in a block."""
        self.lock.acquire()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock; free a channel that was closed meanwhile."""
        self.lock.release()
        if self.closed:
            self._free_if_closed()

    def close(self, reason: str) -> None:
        """Send the others the reason why this member leaves. An exchange of another thread raises."""
        if self.closed or self._links.closed:
            return
        self.closed = True
        self._links.channels.pop(self.group, None)
        self._leave(reason)
        self._free_if_closed()
        if not self._freed:
            self._links.loop.interrupt()

    # A channel may be closed in one thread while another one is in an exchange of it, and reads memory that closing
    # frees. So `close` only marks the channel, and whoever can take the lock without waiting frees it: `close` itself,
    # if no exchange runs; else the thread of the exchange, which calls this after it has released the lock. Both may
    # try at the same time, and both may fail for a moment when a third thread holds the lock for a look (`try_lock`):
    # that one calls this too when it releases the lock. `_freeing` keeps threads out that look without the lock, such
    # as that of a hang report.
    def _free_if_closed(self) -> None:
        if not self.closed or not self.lock.acquire(blocking=False):
            return
        try:
            if not self._freed:
                with self._freeing:
                    self._freed = True
                    self._free()
                self._links.close_channel()
        finally:
            self.lock.release()  # for a thread that has found the channel before it was closed: it raises

    @abstractmethod
    def _leave(self, reason: str) -> None: ...

    @abstractmethod
    def _free(self) -> None:
        """Free memory that the members share."""

    def require_open(self, call: str) -> None:
        if self.closed:
            raise CollectiveError(f"{call}: this rank has left the group, in another thread")

    @abstractmethod
    def _exchange(self, part: Part) -> Verdict:
        """Take part in the next exchange, and return its verdict; if the calls agree, with the bodies to read."""

    @abstractmethod
    def _refresh(self) -> None:
        """Handle the events that have occurred. Does not wait."""

    @property
    def last_agreed_call(self) -> str:
        """The last call of this group that all members have made, or ""."""
        return self._calls[-1][1] if self._calls else ""

    def _last_call(self, member: int) -> str:  # noqa: ARG002
        """Return the last call of this group that a member was seen in, or ""."""
        return self.last_agreed_call

    @abstractmethod
    def _entered(self, member: int) -> tuple[str, int, float] | None:
        """Return the call of another member that it has not finished, as far as is known; None if there is none.

        Any thread may ask, while the channel is not freed.

        Returns:
            The text of the call, the number of the exchange, and when it began, on the monotonic clock.
        """

    def wait_longer(self, part: Part, missing: Sequence[int]) -> None:
        """Tell others, after a wait without news, that this member waits for some; once also the user."""
        self._links.wait_note.write(part.frame.call, part.start)
        part.on_pause([self.ranks[member] for member in missing])
        if part.waited < _NOTICE_SECONDS or part.noticed or not missing:
            return
        # The first member reports, or the next one on its host if the others wait for the first.
        first = min(set(range(len(self.ranks))).difference(missing), default=None)
        if first == self.own and (self.own == 0 or self.same_host):
            part.noticed = True
            log.warning(
                "%s has waited for %.0f s, and may for %g s (init(timeout=)), for %s",
                part.frame.call,
                part.waited,
                part.timeout,
                self._names_and_calls(missing),
            )

    def _names_and_calls(self, members: Sequence[int]) -> str:
        """Return the missing members, each with its last call, and what may not be seen of them."""
        texts = self._with_names({member: self._calls_of(member) for member in members})
        is_somewhere = any(self._links.ongoing_calls(self.ranks[member]) for member in members)
        hint = "" if is_somewhere else ". Collectives of torch, such as those of DDP in backward, are not seen here"
        return f"{texts}{hint}"

    def set_unverified(self, number: int) -> None:
        """Set how many calls of this member were not verified."""
        self._unverified = number

    def _unverified_of(self, member: int) -> int | None:  # noqa: ARG002
        """Return how many calls of another member were not verified; None if that is not known."""
        return None

    def _calls_of(self, member: int) -> str:
        """Return the last call of a missing member in this group, and the calls of other groups that it is in now."""
        last = self._last_call(member)
        unverified = self._unverified_of(member) if self._unverified else 0
        kind = "call" if unverified == 0 else "call with check=True"
        seen = f"last seen in {last}" if last else f"which has made no {kind} of this group yet"
        if self._unverified and unverified is not None:
            seen += f" ({unverified} with check=False, and this rank {self._unverified})"
        calls = self._links.ongoing_calls(self.ranks[member])
        now = "".join(f", now in {call}" for call in calls if call.group != self.group)
        return f", {seen}{now}"

    def _with_names(self, texts: Mapping[int, str]) -> str:
        """Return what is said of members, after their names; of many members, the same is said once."""
        together: dict[object, list[int]] = {}
        for member, text in texts.items():
            together.setdefault(text if len(texts) > _NAMED_EACH else member, []).append(member)
        return "; ".join(
            f"{self._links.names([self.ranks[member] for member in members])}{texts[members[0]]}"
            for members in together.values()
        )

    def lost_error(self, call: str, members: Sequence[int]) -> CollectiveError:
        """Return the error of an exchange for which lost members are missing."""
        texts = {}
        for member in members:
            last = self._last_call(member)
            texts[member] = f" {self.lost_reason(member)}{f' (last seen in {last})' if last else ''}"
        return CollectiveError(f"{call} failed: {self._with_names(texts)}")

    def timeout_error(self, part: Part, missing: Sequence[int]) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{part.frame.call}: not all ranks came within {part.timeout:g} s. "
            f"Missing: {self._names_and_calls(missing)}"
        )


@contextmanager
def try_lock(channel: Channel | None) -> Iterator[Channel | None]:
    """Hold the lock of a channel in a block, and give the channel; None while another thread holds the lock."""
    if channel is None or not channel.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield None if channel.closed else channel
    finally:
        channel.release()


def within_a_moment(find_dead_ranks: Callable[[], str]) -> str:
    """Return the dead ranks that a search finds within half a second; "" if it finds none.

    Of the connections of a process that ends, those to its store, or of torch, may be closed before those of frames.
    """
    deadline = time.monotonic() + _CAUSE_SECONDS
    while not (dead := find_dead_ranks()) and time.monotonic() < deadline:
        time.sleep(_CAUSE_SECONDS / 50)
    return dead
