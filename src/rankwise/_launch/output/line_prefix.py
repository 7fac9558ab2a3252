"""The prefix of each line of a rank: its number, and if the user wants them the host and the time."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from rankwise.errors import InvalidArgumentError, shown

# Set in ranks whose lines get a prefix, for those that would put their rank there too.
HAS_PREFIX: Final = "RANKWISE_HAS_PREFIX"
_PARTS: Final = ("host", "time", "rank")
_COLOURS: Final = (36, 32, 33, 35, 34, 31)


def prefix_parts(prefix: bool | str) -> tuple[str, ...]:
    """Return the parts of a prefix in their order; () for none.

    Args:
        prefix: True for the rank alone, or what stands before it, such as "host,time".

    Raises:
        InvalidArgumentError: It is neither a bool nor made of "host", "time" and "rank".
    """
    if isinstance(prefix, bool):
        return ("rank",) if prefix else ()
    parts = [part.strip() for part in prefix.split(",")] if isinstance(prefix, str) else [""]
    if not set(parts) <= set(_PARTS) or len(set(parts)) < len(parts):
        raise InvalidArgumentError(
            f"prefix={shown(prefix)} is neither a bool nor some of {', '.join(_PARTS)}, such as 'host,time'"
        )
    return (*parts, *(["rank"] if "rank" not in parts else []))


def line_time() -> str:
    """Return the time of a line that is shown or written now."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def shown_parts(prefix: bool | str, nproc: int) -> tuple[str, ...]:
    """Return the parts of the prefix of so many ranks: a single one has none, unless the user has asked for it."""
    return prefix_parts(prefix) if nproc > 1 or isinstance(prefix, str) else ()


def line_prefix(rank: int, nproc: int, *, coloured: bool) -> bytes:
    """Return the prefix with the rank alone; it has the same width for all ranks."""
    return _decorated(f"{rank:>{len(str(nproc - 1))}}", rank, coloured=coloured)


def prefix_maker(
    parts: Sequence[str], rank: int, nproc: int, *, coloured: bool, host: str = "", run: str = ""
) -> Callable[[], bytes]:
    """Return a function that returns the prefix for lines that are shown now.

    Args:
        parts: The parts of the prefix.
        rank, nproc: The rank, and the number of ranks.
        coloured: It has a colour.
        host: The host of the rank; "" for this one.
        run: The name of its launch, if there are several.
    """
    texts = {
        "rank": f"{rank:>{len(str(nproc - 1))}}",
        "host": (host or socket.gethostname()).partition(".")[0],
        "run": run if len(parts) == 1 else f"{run}:",
    }

    def prefix() -> bytes:
        time = line_time() if "time" in parts else ""
        return _decorated(" ".join((texts | {"time": time})[part] for part in parts), rank, coloured=coloured)

    if not parts:
        return lambda: b""
    if "time" in parts:
        return prefix
    fixed = prefix()
    return lambda: fixed


def _decorated(text: str, rank: int, *, coloured: bool) -> bytes:
    text = f"[{text}] "
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m" if coloured else text).encode()
