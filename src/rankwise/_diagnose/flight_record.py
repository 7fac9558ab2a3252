"""Torch's flight record of a rank: the collectives that it has called in each process group.

It is in the memory of the rank, so a thread there writes it into a file in memory when it is asked, over a pipe that
other processes of the user open through /proc. A rank that holds Python's lock, or is stopped, does not answer.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from rankwise._net.json_lines import parse_object
from rankwise._rank_files import descriptors_of, inner_pid
from rankwise.errors import printable

_NAME: Final = re.compile(r"/memfd:rankwise-calls:(\d+):(\d+):")
_PAUSE_SECONDS: Final = 0.002
_JOIN_SECONDS: Final = 1.0
_LONGEST_NAME: Final = 200
_TOKEN_BYTES: Final = 8
_END: Final = b"\0"
# The kinds of requests.
_CALLS: Final = b"c"
_PENDING: Final = b"p"
_END_REQUEST: Final = b"e"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """The collectives that a rank has called in a process group.

    Attributes:
        ranks: The global ranks of the group; empty if they are not known.
        reached: The sequence number of the last one; 0 before the first.
        operations: The names of those that are recorded, by sequence number.
        pending: The sequence numbers of those that have not ended.
    """

    ranks: Sequence[int]
    reached: int
    operations: Mapping[int, str]
    pending: Sequence[int]

    def encode(self) -> dict[str, Any]:
        """Return the calls as values of JSON."""
        operations = {str(number): name for number, name in self.operations.items()}
        return {"ranks": self.ranks, "reached": self.reached, "operations": operations, "pending": self.pending}


def decode_calls(value: Any) -> dict[str, GroupCalls]:  # noqa: ANN401 - of JSON
    """Return the calls of a rank in each group, by its name, in values of JSON, with control characters escaped.

    Raises:
        ValueError: The values are not those of calls.
    """
    try:
        return {
            _text(group): GroupCalls(
                ranks=[int(rank) for rank in calls["ranks"]],
                reached=int(calls["reached"]),
                operations={int(number): _text(name) for number, name in calls["operations"].items()},
                pending=[int(number) for number in calls["pending"]],
            )
            for group, calls in value.items()
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"these are no calls: {error!r}") from error


def _text(value: object) -> str:
    return printable(str(value)[:_LONGEST_NAME])


def offer_calls(
    calls: Callable[[], Mapping[str, GroupCalls]], pending: Callable[[], Mapping[str, int]]
) -> Callable[[], None]:
    """Let other processes of this user request the calls of this rank; return the function that ends that.

    Args:
        calls: Returns the calls in each group.
        pending: Returns a text that identifies the calls that have not ended; empty if there are none.
    """
    requests, write_end = os.pipe()
    file = os.memfd_create(f"rankwise-calls:{os.getpid()}:{write_end}:", os.MFD_CLOEXEC)

    def answer() -> None:
        while request := os.read(requests, _TOKEN_BYTES + 1):
            token, kind = request[:-1], request[-1:]
            if kind == _END_REQUEST:
                return
            try:
                found: dict[str, Any] = (
                    dict(pending()) if kind == _PENDING else {group: each.encode() for group, each in calls().items()}
                )
            except Exception:  # noqa: BLE001 - groups are opened and closed by the main thread meanwhile
                found = {}
            os.ftruncate(file, 0)
            os.pwrite(file, token + json.dumps(found).encode() + _END, 0)

    pid = os.getpid()
    thread = threading.Thread(target=answer, daemon=True, name="rankwise-calls")
    thread.start()

    own = os.fstat(write_end)

    def withdraw() -> None:
        if os.getpid() != pid:
            return
        # The program may have closed all descriptors, and opened others.
        with suppress(OSError):
            if not os.path.samestat(os.fstat(write_end), own):
                return
            os.write(write_end, b"-" * _TOKEN_BYTES + _END_REQUEST)
            thread.join(_JOIN_SECONDS)
            for descriptor in (requests, write_end, file):
                os.close(descriptor)

    return withdraw


def request_calls(pid: int, seconds: float) -> dict[str, GroupCalls] | None:
    """Return the calls of a rank in each group, by its name; None if it does not answer within that many seconds."""
    answer = _request(pid, seconds, _CALLS)
    try:
        return None if answer is None else decode_calls(answer)
    except ValueError:  # of a rank with another version
        return None


def request_pending(pid: int, seconds: float) -> dict[str, int] | None:
    """Return a text that identifies the pending calls of a rank; None if it does not answer in time."""
    return _request(pid, seconds, _PENDING)


def _request(pid: int, seconds: float, kind: bytes) -> dict[str, Any] | None:
    for descriptor, target in descriptors_of(pid).items():
        match = _NAME.match(target)
        if match is not None and int(match[1]) == inner_pid(pid):
            try:
                return _ask(f"/proc/{pid}/fd", descriptor, int(match[2]), time.monotonic() + seconds, kind)
            except (OSError, ValueError):  # it has ended
                return None
    return None


def _ask(folder: str, descriptor: int, pipe: int, deadline: float, kind: bytes) -> dict[str, Any] | None:
    token = secrets.token_hex(_TOKEN_BYTES // 2).encode()
    with open(f"{folder}/{descriptor}", "rb") as file:  # noqa: PTH123 - not a path of a file system
        request = os.open(f"{folder}/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(request, token + kind)
        finally:
            os.close(request)
        while time.monotonic() < deadline:
            file.seek(0)
            answer = file.read()
            if answer.startswith(token) and answer.endswith(_END):
                return parse_object(answer[len(token) : -1])
            time.sleep(_PAUSE_SECONDS)
    return None
