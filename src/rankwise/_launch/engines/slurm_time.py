"""Durations as sbatch reads them."""

from __future__ import annotations

import re
from typing import Final

from rankwise.errors import InvalidArgumentError, shown

# "minutes[:seconds]", "hours:minutes:seconds", "days-hours[:minutes[:seconds]]"
_PATTERN: Final = re.compile(
    r"(?P<days>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?"
    r"|(?P<minutes>\d+)(:(?P<seconds>\d+))?|(?P<H>\d+):(?P<M>\d+):(?P<S>\d+)"
)


def minutes_of(time: str | int) -> int | None:
    """Return a duration in minutes, rounded up as Slurm does; None for "".

    Raises:
        InvalidArgumentError: It is not a duration above 0.

    Example:
        >>> minutes_of("1:30:00"), minutes_of("1-12"), minutes_of(5)
        (90, 2160, 5)
    """
    if time == "":
        return None
    match = _PATTERN.fullmatch(str(time))
    parts = {} if match is None else {name: int(text) for name, text in match.groupdict().items() if text}
    days, hours = parts.get("days", 0), parts.get("h", parts.get("H", 0))
    minutes = parts.get("m", parts.get("M", parts.get("minutes", 0)))
    seconds = parts.get("s", parts.get("S", parts.get("seconds", 0)))
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if isinstance(time, bool) or not total:
        raise InvalidArgumentError(
            f"time={shown(time)} is not a time limit: minutes, hours:minutes:seconds, or days-hours[:minutes[:seconds]]"
        )
    return -(-total // 60)
