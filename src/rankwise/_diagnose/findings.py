"""The findings of the watcher of a host about its ranks, also as JSON, for the watcher of another host."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankwise._diagnose.flight_record import GroupCalls, decode_calls
from rankwise._diagnose.sampling import ProcessSample, RankSample
from rankwise._diagnose.stack import Stack, StackFrame
from rankwise._diagnose.watching import waits
from rankwise.errors import printable

# Bounds on what another host sends.
_LONGEST_TEXT: Final = 1000
_MOST_FRAMES: Final = 200
_MOST_ITEMS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The ranks of a host.

    Attributes:
        host: The name of the host.
        history: Some samples of the ranks, the last one of now.
        quiet: For how many seconds each rank has not moved.
        polling: For how many seconds each rank that does not sleep has been in the same collectives.
        calls: The collectives that ranks have called in each process group of torch, of those that have answered.
        spent: The seconds between the first and the last sample.
        late: How late each rank came to its last collectives, on average, in seconds; {} if that is not known.
    """

    host: str = field(default_factory=socket.gethostname)
    history: Sequence[Sequence[RankSample]]
    quiet: Mapping[int, float]
    spent: float
    polling: Mapping[int, float] = field(default_factory=dict)
    calls: Mapping[int, Mapping[str, GroupCalls]] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks."""
        return [sample.rank for sample in self.history[-1]]

    def longest_wait(self) -> float:
        """Return for how long the rank that has been in a collective in all samples has waited; 0 without one."""
        waiting = [{sample.rank for sample in samples if waits(sample.process)} for samples in self.history]
        asleep = (self.quiet.get(rank, 0.0) for rank in set.intersection(*waiting))
        return max((*asleep, *self.polling.values()), default=0.0)

    def wait_of(self, rank: int) -> float:
        """Return for how many seconds a rank has waited; 0 if it is not one of this host."""
        return max(self.quiet.get(rank, 0.0), self.polling.get(rank, 0.0))

    def encode(self) -> dict[str, Any]:
        """Return the findings as values of JSON."""
        return {
            "host": self.host,
            "history": [[_encode_rank(sample) for sample in samples] for samples in self.history],
            "quiet": {str(rank): seconds for rank, seconds in self.quiet.items()},
            "spent": self.spent,
            "polling": {str(rank): seconds for rank, seconds in self.polling.items()},
            "late": {str(rank): seconds for rank, seconds in self.late.items()},
            "calls": {
                str(rank): {group: each.encode() for group, each in calls.items()} for rank, calls in self.calls.items()
            },
        }

    @classmethod
    def decode(cls, value: Any) -> Findings:  # noqa: ANN401 - of JSON
        """Return the findings in values of JSON, with control characters escaped.

        Raises:
            ValueError: The values are not those of findings.
        """
        try:
            found = cls(
                host=_text(value["host"]),
                history=[[_decode_rank(sample) for sample in _items(samples)] for samples in _items(value["history"])],
                quiet={int(rank): float(seconds) for rank, seconds in value["quiet"].items()},
                spent=float(value["spent"]),
                polling={int(rank): float(seconds) for rank, seconds in value["polling"].items()},
                late={int(rank): float(seconds) for rank, seconds in value["late"].items()},
                calls={int(rank): decode_calls(calls) for rank, calls in value["calls"].items()},
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these are no findings: {error!r}") from error
        if not found.history:
            raise ValueError("these are no findings: there is no sample")
        return found


def _encode_rank(sample: RankSample) -> dict[str, Any]:
    return {
        "rank": sample.rank,
        "process": _encode_process(sample.process),
        "workers": [_encode_process(worker) for worker in sample.workers],
    }


def _encode_process(sample: ProcessSample) -> dict[str, Any]:
    stack = sample.stack
    frames = None if stack is None else [[frame.function, frame.file, frame.line] for frame in stack.frames]
    return {
        "pid": sample.pid,
        "state": sample.state,
        "channel": sample.channel,
        "cpu": sample.cpu_seconds,
        "run": sample.run_seconds,
        "delay": sample.delay_seconds,
        "reason": sample.reason,
        "frames": frames,
        "waits_for_device": sample.waits_for_device,
        "location": "" if stack is None else stack.location,
    }


def _decode_rank(value: Any) -> RankSample:  # noqa: ANN401 - of JSON
    workers = tuple(_decode_process(worker) for worker in _items(value["workers"]))
    return RankSample(rank=int(value["rank"]), process=_decode_process(value["process"]), workers=workers)


def _decode_process(value: Any) -> ProcessSample:  # noqa: ANN401 - of JSON
    stack = None
    if value["frames"] is not None:
        frames = [
            StackFrame(_text(function), _text(file), int(line))
            for function, file, line in _items(value["frames"])[:_MOST_FRAMES]
        ]
        # The lines of the program are on the host that has sent this.
        stack = Stack(frames, known_location=_text(value["location"]))
    return ProcessSample(
        pid=int(value["pid"]),
        state=_text(value["state"]),
        channel=_text(value["channel"]),
        cpu_seconds=float(value["cpu"]),
        run_seconds=float(value["run"]),
        delay_seconds=float(value["delay"]),
        stack=stack,
        reason=_text(value["reason"]),
        waits_for_device=bool(value["waits_for_device"]),
    )


def _items(value: Any) -> list[Any]:  # noqa: ANN401 - of JSON
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise TypeError(f"a {type(value).__name__} instead of a list of at most {_MOST_ITEMS} items")
    return value


def _text(value: Any) -> str:  # noqa: ANN401 - of JSON
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} instead of a text")
    return printable(value[:_LONGEST_TEXT])
