"""The recorded calls of a rank, with those of torch's own collectives: DDP, FSDP, `torch.distributed`.

Since torch 2.15 a process group calls hooks before each collective. Before that its flight recorder keeps the last
ones, which are added at the end; it has the time of each, but no call site.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rankwise._torch import flight_records, open_groups
from rankwise._trace.recording import Recording
from rankwise._user_frames import call_site

if TYPE_CHECKING:
    import torch.distributed as dist

_HOOK: Final = 0x72616E6B  # torch wants a number that no other hook has
_OF_TWO_RANKS: Final = frozenset({"send", "recv"})


class TorchCalls:
    """A recorder of the calls of rankwise that adds those of torch."""

    def __init__(self, recording: Recording) -> None:
        """Begin, with the process groups that are open; with hooks, also with those that are opened later."""
        self._recording = recording
        self._since_ns = time.time_ns()
        self._hooked: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._hooking = threading.Lock()
        self._attach()

    def begin(self, group: int, sequence: int, call: str) -> int:
        """As `Recorder.begin`."""
        self._attach()
        return self._recording.begin(group, sequence, call)

    def end(self, number: int) -> None:
        """As `Recorder.end`."""
        self._recording.end(number)

    def close(self) -> None:
        """Record nothing more; without hooks, add what torch has recorded."""
        for group in self._hooked:
            group.unregister_pre_hook(_HOOK)  # type: ignore[attr-defined]  # since 2.15
        if not self._hooked:
            self._add_flight_records()

    def _attach(self) -> None:
        with self._hooking:
            for group in open_groups():
                if group not in self._hooked and hasattr(group, "register_pre_hook"):
                    group.register_pre_hook(_HOOK, self._hook_of(str(group.group_name)))
                    self._hooked.add(group)

    def _hook_of(self, name: str) -> Callable[[Any], None]:
        number, sequence = _number_of(name), itertools.count(1)

        def record(arguments: Any) -> None:  # noqa: ANN401 - torch's
            operation = arguments.name.name.lower()
            if operation not in _OF_TWO_RANKS:
                self._recording.begin(number, next(sequence), f"torch {operation} at {call_site()}")

        return record

    def _add_flight_records(self) -> None:
        clock_ns = time.time_ns() - time.monotonic_ns()
        for record in flight_records(collectives=True).values():
            for entry in record.get("entries", []):
                created, name = int(entry["time_created_ns"]), str(entry["process_group"][0])
                if created >= self._since_ns and not entry["is_p2p"]:
                    call = f"torch {str(entry['profiling_name']).rpartition(':')[2]} in group {name}"
                    came = (created - clock_ns) / 1e9
                    self._recording.begin(_number_of(name), int(entry["collective_seq_id"]), call, came=came)


def _number_of(name: str) -> int:
    """Return a number for a process group of torch that is the same on all ranks, and none of a group of rankwise."""
    return -1 - zlib.crc32(name.encode())
