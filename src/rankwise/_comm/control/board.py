"""The board: what a rank tells ranks of other hosts without their help, as notes in the store of the session.

A leader that is late passes nothing on. So what must not wait for it is written here: that a member of a group has
failed, or waits no longer; that a rank is gone; and which members have waited in an exchange for a while. Ranks look
here only after they have waited for a moment, so no call pays for it that is not slow already.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from torch.distributed import Store

from rankwise._comm.control.calls import Calls, decode_calls, encode_calls
from rankwise._comm.control.protocol import Frame, FrameKind

BOARD_THREAD: Final = "rankwise: board"
# In place of the id of a group, for what concerns all groups of a rank.
SESSION: Final = (1 << 64) - 1
# The two kinds of notes about an exchange; with the group and the number of the exchange they are a key of the store.
_END: Final = "end"
_WAITING: Final = "waiting"
_Key: TypeAlias = tuple[str, int, int]
# A note that was numbered and not written after so long is of a rank that has died in between.
_WRITING_SECONDS: Final = 5.0
# A rank that fails in each call writes more and more notes before the next agreement. Then the first ones go: what they
# say also went to the neighbours in the tree.
_MOST_NOTES: Final = 200
# How long a rank that leaves waits until what it has to say is written.
_CLOSING_SECONDS: Final = 5.0


class _Notes:
    """Notes of one kind, numbered from 1 by a counter in the store. All but `records` is for one thread.

    Attributes:
        records: Those that this rank has read.
    """

    def __init__(self, store: Store, key: str) -> None:
        self.records: list[Calls] = []
        self._store = store
        self._key = key
        self._num_read = 0
        self._unwritten: dict[int, float] = {}  # the numbers without a note: when that was first seen
        self._own: list[str] = []

    def add(self, records: Sequence[Calls]) -> None:
        key = f"{self._key}/{self._store.add(self._key, 1)}"
        self._own.append(key)
        self._store.set(key, encode_calls(records))  # type: ignore[arg-type]  # bytes are accepted

    def read(self) -> None:
        """Read the notes that were not read before."""
        if not self._store.check([self._key]):
            return
        count, now = self._store.add(self._key, 0), time.monotonic()
        numbers = [*self._unwritten, *range(self._num_read + 1, count + 1)]
        self._num_read = max(count, self._num_read)
        keys = [f"{self._key}/{number}" for number in numbers]
        # One question to the store, unless one of the notes is missing.
        are_written = bool(keys) and self._store.check(keys)
        written = [number for number, key in zip(numbers, keys, strict=True) if are_written or self._store.check([key])]
        self._unwritten = {
            number: since
            for number in numbers
            if number not in written and now - (since := self._unwritten.get(number, now)) < _WRITING_SECONDS
        }
        for note in self._store.multi_get([f"{self._key}/{number}" for number in written]) if written else ():
            self.records += decode_calls(note)

    def delete(self) -> None:
        """Delete what this rank has written."""
        for key in self._own:
            self._store.delete_key(key)
        if self._own:
            self._store.delete_key(self._key)
        self._own.clear()


class Board:
    """The board of a session. Any thread may use it.

    A store whose host is lost may answer after minutes. So a thread asks it, from the first use on, and nobody waits
    for that thread: who wants to know something asks for a look, and finds what has come at the next one.

    Attributes:
        has_left: This rank has written that it leaves the session.
    """

    def __init__(self, store: Store, *, on_news: Callable[[], object] = lambda: None) -> None:
        """Open the board.

        Args:
            store: The store of the session.
            on_news: Called in the thread after it has read notes.
        """
        self.has_left = False
        self._store = store
        self._on_news = on_news
        self._lock = threading.Lock()
        self._notes: dict[_Key, _Notes] = {}
        self._posted: deque[_Key] = deque()
        self._lost = _Notes(store, "gone")
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._reading: set[_Notes] = set()  # what was asked for, and not read yet
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # Of what ends an exchange there are few notes, and each rank that waits reads them. Who waits is written once for
    # each host, and read by few: if all read it, a call that is late would take the square of the number of hosts.
    def post_end(self, group: int, sequence: int, record: Calls) -> None:
        """Write what ends an exchange of a group; `forget` deletes it."""
        self._post((_END, group, sequence), [record])

    def post_waiting(self, group: int, sequence: int, records: Sequence[Calls]) -> None:
        """Write which members wait in an exchange of a group; `forget` deletes it."""
        self._post((_WAITING, group, sequence), records)

    def look(self, group: int, sequence: int) -> None:
        """Ask for a look at what has ended an exchange, and at which ranks are gone."""
        self._read(self._of((_END, group, sequence)))
        self.look_for_losses()

    def look_for_waiting(self, group: int, sequence: int) -> None:
        """Ask for a look at which members wait in an exchange."""
        self._read(self._of((_WAITING, group, sequence)))

    def ends(self, group: int, sequence: int) -> Sequence[Calls]:
        """Return what ranks have written that ends an exchange, as of the last look."""
        return self._records((_END, group, sequence))

    def waiting(self, group: int, sequence: int) -> Sequence[Calls]:
        """Return which members wait in an exchange, as of the last look."""
        return self._records((_WAITING, group, sequence))

    def forget(self, group: int, sequence: int) -> None:
        """Delete this rank's notes about the exchanges of a group before `sequence`: all members have left them."""
        self._delete([key for key in tuple(self._notes) if key[1] == group and key[2] < sequence])

    def mark_gone(self, rank: int, reason: str, group: int = SESSION) -> None:
        """Write that a rank takes part in nothing any more, or in nothing of a group."""
        frame = Frame(FrameKind.LEFT, "", group=group, sequence=rank, body=reason.encode())
        known = f"gone/{group}/{rank}"

        def add() -> None:
            # By a key of its own: at the end of a job all ranks leave, and must not read the notes of all others.
            if not self.gone(rank, group) and not self._store.check([known]):
                self._lost.add([Calls.of(0, frame)])
                self._store.set(known, "")

        self._submit(add)

    def gone(self, rank: int, group: int) -> str:
        """Return why a rank takes part in nothing of a group any more, as of the last look; "" if it does."""
        for calls in tuple(self._lost.records):
            if calls.frame.sequence == rank and calls.frame.group in (group, SESSION):
                return calls.bodies[0].decode(errors="replace")
        return ""

    def gone_ranks(self, group: int) -> set[int]:
        """Return the ranks that take part in nothing of a group any more, as of the last look."""
        return {calls.frame.sequence for calls in tuple(self._lost.records) if calls.frame.group in (group, SESSION)}

    def look_for_losses(self) -> None:
        """Ask for a look at which ranks are gone."""
        self._read(self._lost)

    def close(self) -> None:
        """End the thread, after what is left was written. A forked child does not have the thread."""
        if self._thread is not None and os.getpid() == self._pid:
            self._tasks.put(None)
            self._thread.join(_CLOSING_SECONDS)

    def _of(self, key: _Key) -> _Notes:
        with self._lock:
            return self._notes.setdefault(key, _Notes(self._store, "/".join(map(str, key))))

    def _records(self, key: _Key) -> Sequence[Calls]:
        notes = self._notes.get(key)
        return () if notes is None else tuple(notes.records)

    def _post(self, key: _Key, records: Sequence[Calls]) -> None:
        notes = self._of(key)
        self._posted.append(key)
        if len(self._posted) > _MOST_NOTES:
            self._delete([self._posted.popleft()])
        self._submit(lambda: notes.add(records))

    def _read(self, notes: _Notes) -> None:
        if notes in self._reading:
            return
        self._reading.add(notes)

        def read() -> None:
            self._reading.discard(notes)
            notes.read()

        self._submit(read)

    def _delete(self, keys: Sequence[_Key]) -> None:
        with self._lock:
            forgotten = [self._notes.pop(key) for key in keys if key in self._notes]
        for notes in forgotten:
            self._submit(notes.delete)

    def _submit(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=BOARD_THREAD, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with suppress(RuntimeError):  # of a store that fails there are no news
                task()
            self._on_news()
