"""One rank works, and the others wait for it: for hours if it takes hours, and not for a moment after it failed.

Not a collective, which would time out, but a note in the store. That the working rank has died is told by its
connection; in groups too large for connections it gives a sign of life every other second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store

from rankwise._comm.control.protocol import Call, Failure
from rankwise._comm.group import Comm
from rankwise._net.json_lines import decode_line, encode_line
from rankwise.errors import CollectiveError, RemoteRankError

_BEAT_SECONDS: Final = 2.0
# A rank that holds Python's lock for long, as in reading one large file, gives no sign of life in that time.
_SILENCE_SECONDS: Final = 60.0
# The pause between two looks at the store is a tenth of what was waited so far, within these.
_PAUSE_SECONDS: Final = (0.001, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """How a turn ended, as it stands in the store.

    Attributes:
        failed: With an error; the rest is a `RemoteRankError`'s.
    """

    failed: bool = False
    rank: int = 0
    host: str = ""
    raised: str = ""
    traceback: str = ""


class ExclusiveSection:
    """The turn of one member.

    Every member makes one, in the same order; the one whose turn it is works in `working`, the others `wait`.
    """

    def __init__(self, comm: Comm, call: Call, place: int, *, readers: int | None = None) -> None:
        self._comm = comm
        self._call = call
        self._place = place
        self._rank = comm.ranks[place]
        self._readers = comm.size - 1 if readers is None else readers
        self._board = comm.shared_store()
        comm.num_exclusive_sections += 1
        self._key = f"turn/{comm.num_exclusive_sections}"
        self._beating: threading.Thread | None = None
        self._ended = threading.Event()

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Let no collective begin in a block, on any member: the others would wait for the end of the turn.

        Raises:
            CollectiveError: This rank is in a collective, in another thread; told to the
                others if they wait for this rank.
        """
        try:
            guard = self._comm.block_collectives(self._call)
        except CollectiveError as error:
            if self._comm.rank == self._place:
                self.end(error)
            raise
        try:
            yield
        finally:
            guard.release()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work, and tell the others how that ended."""
        self.begin()
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end(None)

    def begin(self) -> None:
        """Begin to work: give signs of life, where the connections do not."""
        if self._board is not None and not self._comm.uses_mesh:
            self._beating = threading.Thread(target=self._beat, args=(self._board,), daemon=True, name="rankwise-beat")
            self._beating.start()

    def end(self, error: BaseException | None) -> None:
        """Tell the others how it ended."""
        if self._beating is not None:
            self._ended.set()
            self._beating.join()
        note = _Note()
        if isinstance(error, RemoteRankError):  # it could not begin, for another rank had failed: that is what to tell
            note = _Note(failed=True, rank=error.rank, host=error.host, raised=error.raised, traceback=error.traceback)
        elif error is not None:
            failure = Failure.of(error, self._call.text)
            note = _Note(
                failed=True, rank=self._rank, host=failure.host, raised=failure.raised, traceback=failure.traceback
            )
        if self._board is not None and self._readers:
            with contextlib.suppress(RuntimeError):  # nobody serves the store any more: then nobody waits
                self._board.set(self._key, encode_line(note))
                # To set is not to be answered, and what this rank does next may be heard of before the note is there;
                # an answer on the same connection comes after it.
                self._board.check([self._key])

    def wait(self) -> None:
        """Wait until the other rank has worked.

        Raises:
            RemoteRankError: It failed.
            CollectiveError: It is gone.
        """
        if self._board is None:
            return
        try:
            note = self._note(self._board)
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            cause = self._comm.dead_ranks([self._rank]) or "the store is gone, and with it the rank that served it"
            raise CollectiveError(f"{self._call.text} waits for rank {self._rank} in vain: {cause}") from error
        if note.failed:
            raise RemoteRankError(rank=note.rank, host=note.host, raised=note.raised, traceback=note.traceback)

    def _note(self, board: Store) -> _Note:
        start = heard = time.monotonic()
        beat = 0
        shortest, longest = _PAUSE_SECONDS
        while not board.check([self._key]):
            gone = self._comm.dead_ranks([self._rank])
            if gone and not board.check([self._key]):
                raise CollectiveError(f"{self._call.text} waits for rank {self._rank} in vain: {gone}")
            now = time.monotonic()
            if not self._comm.uses_mesh:
                latest = board.add(f"{self._key}/beat", 0)
                if latest != beat:
                    beat, heard = latest, now
                elif now - heard > _SILENCE_SECONDS:
                    raise CollectiveError(
                        f"{self._call.text} waits for rank {self._rank} in vain: it has given no sign of life for "
                        f"{_SILENCE_SECONDS:g} s"
                    )
            time.sleep(min(max(shortest, (now - start) / 10), longest))
        text = board.get(self._key)
        if board.add(f"{self._key}/readers", 1) == self._readers:
            for key in (self._key, f"{self._key}/readers", f"{self._key}/beat"):
                board.delete_key(key)
        try:
            return decode_line(_Note, text)
        except ValueError as error:
            raise CollectiveError(
                f"{self._call.text}: how the turn of rank {self._rank} ended cannot be read in the store: {error}; "
                "does another program use the store?"
            ) from error

    def _beat(self, board: Store) -> None:
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(_BEAT_SECONDS):
                board.add(f"{self._key}/beat", 1)
