"""A critical section that one rank runs while the others wait for its end, without a timeout.

The end is not a collective, which would time out, but an entry in the store. The others detect the death of the owner
as in a collective.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from torch.distributed import Store

from rankwise._comm.comm import Comm
from rankwise._comm.control.call import Call
from rankwise._comm.control.channel import within_a_moment
from rankwise._comm.control.protocol import remote_error
from rankwise._net.json_lines import decode_line, encode_line
from rankwise.errors import CollectiveError, RemoteRankError

log = logging.getLogger(__name__)

# After such a wait the user is told, once.
_NOTICE_SECONDS: Final = 60.0
# The interval between two polls of the store is a tenth of the time waited so far, but within these limits.
_POLL_SECONDS: Final = (0.001, 1.0)
# The entry in the store of a section that has ended without an error; else it is a `_Failure`.
_SUCCESS: Final = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """The attributes of the RemoteRankError that the other members raise."""

    rank: int
    host: str
    raised: str
    traceback: str


class ExclusiveSection:
    """A critical section of one member, the owner.

    Every member creates one, in the same order. The owner runs its block in `working`, the other members call `wait`.
    """

    def __init__(self, comm: Comm, call: Call, owner: int, *, readers: int | None = None) -> None:
        self._comm = comm
        self._call = call
        self._owner = owner
        self._owner_rank = comm.ranks[owner]
        self._readers = comm.size - 1 if readers is None else readers
        self._store = comm.shared_store()
        comm.num_exclusive_sections += 1
        self._key = f"exclusive_section/{comm.num_exclusive_sections}"

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Forbid collectives in a block, on every member: the members that wait could not take part, a deadlock.

        Raises:
            CollectiveError: This rank is in a collective, in another thread. The other members raise it too if this
                rank is the owner.
        """
        try:
            turns = self._comm.control.turns.block_collectives(self._call)
        except CollectiveError as error:
            if self._comm.rank == self._owner:
                self.end(error)
            raise
        try:
            yield
        finally:
            turns.release()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Run a block as the owner, and report its end to the other members."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Report the end of the section to the other members."""
        # If another rank failed before this one, the others get the first error.
        if error is not None and not isinstance(error, RemoteRankError):
            error = remote_error(error, self._owner_rank, self._call.text)
        if self._store is not None and self._readers:
            with contextlib.suppress(RuntimeError):  # the process that serves the store has ended, and so nobody waits
                self._store.set(self._key, _encoded(error))
                # `set` does not wait for the store, so that a later message of this rank on another connection might
                # arrive before the entry. The reply to `check`, on the same connection, comes after the entry is there.
                self._store.check([self._key])

    def wait(self) -> None:
        """Wait until the owner has ended the section.

        Raises:
            RemoteRankError: The section failed.
            CollectiveError: The owner is dead.
        """
        if self._store is None:
            return
        try:
            failure = self._poll_result(self._store)
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            dead = within_a_moment(lambda: self._comm.control.dead_ranks([self._owner_rank]))
            cause = dead or "the rank that serves the store is dead"
            raise CollectiveError(f"{self._call.text} waits for rank {self._owner_rank} in vain: {cause}") from error
        if failure is not None:
            raise failure

    def _poll_result(self, store: Store) -> RemoteRankError | None:
        start, has_told = time.monotonic(), False
        shortest, longest = _POLL_SECONDS
        while not store.check([self._key]):
            dead = self._comm.control.dead_ranks([self._owner_rank])
            # It may have died after it had ended the section: then the entry is there by now.
            if dead and not store.check([self._key]):
                raise CollectiveError(f"{self._call.text} waits for rank {self._owner_rank} in vain: {dead}")
            now = time.monotonic()
            if now - start > _NOTICE_SECONDS and not has_told:
                has_told = True
                self._tell_of_long_wait(now - start)
            time.sleep(min(max(shortest, (now - start) / 10), longest))
        text = store.get(self._key)
        # The last reader deletes the entry, so that the store does not grow with the number of sections.
        if store.add(f"{self._key}/readers", 1) == self._readers:
            for key in (self._key, f"{self._key}/readers"):
                store.delete_key(key)
        try:
            return _decoded(text.decode())
        except ValueError as error:
            raise CollectiveError(
                f"{self._call.text}: the result of rank {self._owner_rank} cannot be read in the store: {error}; "
                "does another program use the store?"
            ) from error

    def _tell_of_long_wait(self, seconds: float) -> None:
        """Tell the user, on one of the ranks that wait: nothing else ends a section whose owner waits for them."""
        if self._comm.rank == (0 if self._owner else 1):
            log.warning(
                "%s has waited for %.0f s for the block of rank %d; if that is in a collective of torch there, such as "
                "forward() of DDP or compute() of torchmetrics, it waits for this rank: use model.module, or leave the "
                "block first",
                self._call.text,
                seconds,
                self._owner_rank,
            )


def _encoded(failure: RemoteRankError | None) -> str:
    if failure is None:
        return _SUCCESS
    return encode_line(
        _Failure(rank=failure.rank, host=failure.host, raised=failure.raised, traceback=failure.traceback)
    )


def _decoded(entry: str) -> RemoteRankError | None:
    """Return the error in an entry.

    Raises:
        ValueError: The entry is none of a section.
    """
    return None if entry == _SUCCESS else RemoteRankError(**asdict(decode_line(_Failure, entry)))
