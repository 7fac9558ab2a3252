"""The record of one rank's calls: a file that is mapped into memory, so that it is complete however the rank ends.

The file is a header, a line of JSON; the texts of the calls, one in a line; and a ring of the last calls. All of its
room is taken when it is made: a disk that is full later cannot end the rank.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankwise._net.host import host_id
from rankwise.errors import printable

SUFFIX: Final = ".calls"
# Group, number of the call in it, when the rank came, when the call ended (0 if it has not), index of the text.
_CALL: Final = struct.Struct("<qqddI4x")
_ENDED: Final = struct.Struct("<d")
_ENDED_OFFSET: Final = 24
_HEADER_BYTES: Final = 1 << 12
_TEXT_BYTES: Final = 1 << 16
_RING: Final = _HEADER_BYTES + _TEXT_BYTES
NUM_CALLS: Final = 1 << 16
_FILE_BYTES: Final = _RING + NUM_CALLS * _CALL.size
_LONGEST_TEXT: Final = 200
_OTHER: Final = "other calls"


class Recording:
    """Records the calls of this rank in a file; a `Recorder`."""

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        """Make the file.

        Raises:
            OSError: It cannot be made, or there is no room for it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank{rank:05}{SUFFIX}"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "r+b") as opened:
                opened.write(bytes(_FILE_BYTES))
                opened.flush()
                os.fsync(opened.fileno())  # a file system may find only then that it has no room
                self._data = mmap.mmap(opened.fileno(), _FILE_BYTES)
        except OSError:
            with suppress(OSError):
                file.unlink()
            raise
        # The clock of the records, and the time of day then.
        clock = {"monotonic": time.monotonic(), "time": time.time()}
        facts = {"rank": rank, "world_size": world_size, "host": socket.gethostname(), "host_id": host_id(), **clock}
        header = json.dumps(facts).encode()
        self._data[: len(header)] = header
        self._numbers = itertools.count()
        self._texts: dict[str, int] = {}
        self._adding = threading.Lock()
        self._free = _HEADER_BYTES
        self._index_of(_OTHER)

    def begin(self, group: int, sequence: int, call: str, *, came: float = 0.0) -> int:
        """Record that this rank comes to a call, now or at another time; return where to record its end."""
        text = self._texts.get(call)
        offset = _RING + next(self._numbers) % NUM_CALLS * _CALL.size
        number = self._index_of(call) if text is None else text
        _CALL.pack_into(self._data, offset, group, sequence, came or time.monotonic(), 0.0, number)
        return offset

    def end(self, number: int) -> None:
        """Record that the call has ended."""
        _ENDED.pack_into(self._data, number + _ENDED_OFFSET, time.monotonic())

    def _index_of(self, call: str) -> int:
        line = call[:_LONGEST_TEXT].replace("\n", " ").encode(errors="backslashreplace") + b"\n"
        with self._adding:
            if call not in self._texts:
                if self._free + len(line) > _RING:
                    return 0
                self._data[self._free : self._free + len(line)] = line
                self._free += len(line)
                self._texts[call] = len(self._texts)
            return self._texts[call]


@dataclass(slots=True)
class RankCall:
    """A call of a rank.

    Attributes:
        text: The operation and its call site.
        came: When the rank came, in seconds on the monotonic clock of its host.
        ended: When the call ended; 0 if it has not, or if that is not known.
    """

    text: str
    came: float
    ended: float


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """What the file of a rank has.

    Attributes:
        rank, world_size: Those of the rank.
        host, host_id: The name of its host, and what is the same for all ranks there.
        clock: What to add to the monotonic clock for the time of day.
        calls: The calls, by their group and their number in it, in the order in which the rank came.
    """

    rank: int
    world_size: int
    host: str
    host_id: str
    clock: float
    calls: dict[tuple[int, int], RankCall]


def read_record(file: Path, *, most: int) -> RankRecord:
    """Return the last calls in a file, at most so many; the rank may be writing it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is another file, or damaged.
    """
    data = file.read_bytes()
    if len(data) != _FILE_BYTES:
        raise ValueError(f"{len(data)} bytes, and not {_FILE_BYTES}")
    facts: dict[str, Any] = json.loads(data[:_HEADER_BYTES].rstrip(b"\0"))
    lines = data[_HEADER_BYTES:_RING].rstrip(b"\0").decode(errors="replace").splitlines()
    try:
        return RankRecord(
            rank=int(facts["rank"]),
            world_size=int(facts["world_size"]),
            host=printable(str(facts["host"])),
            host_id=str(facts["host_id"]),
            clock=float(facts["time"]) - float(facts["monotonic"]),
            calls=dict(_calls(data, [printable(line) for line in lines], most)),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header is not that of a trace: {error!r}") from error


def _calls(data: bytes, texts: list[str], most: int) -> Iterator[tuple[tuple[int, int], RankCall]]:
    found = [each for each in _CALL.iter_unpack(data[_RING:]) if each[2] > 0]
    for group, sequence, came, ended, text in sorted(found, key=lambda each: each[2])[-most:]:
        yield (group, sequence), RankCall(texts[text] if text < len(texts) else _OTHER, came, ended)
