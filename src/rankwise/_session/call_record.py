"""The collectives that this rank has called in each process group, from torch's flight recorders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rankwise._diagnose.flight_record import GroupCalls
from rankwise._torch import flight_records, ranks_of_groups

# Ranks that hang are seldom so many collectives apart.
_MOST_OPERATIONS: Final = 100


class CallRecord:
    """The record of one session: earlier ones of this process had groups with the same names."""

    def __init__(self, *, adopted: bool) -> None:
        """Begin.

        Args:
            adopted: Other code has opened the process group, and may have used it before.
        """
        self._since_ns = 0 if adopted else time.time_ns()
        self._left = _begun()

    def pending(self) -> dict[str, int]:
        """Return the sequence number of the last collective of each group in which one has not ended, by any key."""
        return {group: numbers[0] for group, numbers in _begun().items() if self._left.get(group) != numbers}

    def calls(self) -> dict[str, GroupCalls]:
        """Return the calls in each group that is open, by its name and its backend, of groups with any.

        A group with backends for several types of devices has a sequence of numbers for each of them.
        """
        ranks = ranks_of_groups()
        return {
            f"{group} ({backend})": calls
            for backend, record in flight_records(collectives=True).items()
            for group, calls in self._calls(record.get("entries", []), ranks).items()
        }

    def _calls(self, entries: Iterable[Mapping[str, Any]], ranks: Mapping[str, Sequence[int]]) -> dict[str, GroupCalls]:
        found: dict[str, GroupCalls] = {}
        for entry in sorted(entries, key=lambda entry: int(entry["record_id"])):
            group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            if entry["is_p2p"] or group not in ranks or int(entry["time_created_ns"]) < self._since_ns:
                continue
            before = found.get(group) or GroupCalls(ranks=ranks[group], reached=0, operations={}, pending=[])
            operations = {
                **before.operations,
                number: str(entry["profiling_name"]).rpartition(":")[2],
            }  # "gloo:barrier"
            found[group] = GroupCalls(
                ranks=ranks[group],
                reached=number,
                operations=dict(list(operations.items())[-_MOST_OPERATIONS:]),
                pending=[*before.pending, *([] if entry["retired"] else [number])],
            )
        return found


def _begun() -> dict[str, tuple[int, int]]:
    """Return, of each group with a pending one, the numbers of the last collective begun and of the last that ended."""
    numbers = {
        f"{group} ({backend})": (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
        for backend, record in flight_records(collectives=False).items()
        for group, status in record.get("pg_status", {}).items()
    }
    return {group: (begun, ended) for group, (begun, ended) in numbers.items() if begun > ended}
