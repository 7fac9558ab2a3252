"""What can go wrong, as a tree of exceptions.

    RankwiseError
    ├── LauncherEnvironmentError   ValueError     a launcher's variables are incomplete, contradictory or unreadable
    ├── TopologyError              ValueError     the numbers that place a rank in its world do not fit together
    ├── InvalidArgumentError       ValueError     an argument cannot be used; raised before anything is sent
    ├── PayloadTypeError           TypeError      this operation is not defined for a value of this type
    ├── MissingDependencyError     ImportError    this interpreter has no torch
    ├── NotJoinedError             RuntimeError   the world is larger than one and this process has not joined it
    ├── JoinError                  RuntimeError   the ranks could not meet
    │   └── JoinTimeoutError       TimeoutError   ... in time
    ├── CollectiveError            RuntimeError   a collective failed: a rank died, or did not take part
    │   ├── CollectiveTimeoutError TimeoutError   ... in time
    │   └── MismatchError          ValueError     the calls of the ranks do not match
    ├── StoreError                 RuntimeError   the store of the session cannot be used: its server has ended
    │   └── StoreTimeoutError      TimeoutError   a key was not set in time
    ├── RemoteRankError            RuntimeError   another rank raised; its traceback is in the message
    └── LaunchError                RuntimeError   a world could not be started
        └── RankFailedError                       a rank ended with an error

Every message has the expected and the actual value, the source of that value, and the next step for the user.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Of the first line of a message.
_LONGEST_LINE: Final = 200


class RankwiseError(Exception):
    """The root of everything that rankwise raises on purpose."""


class LauncherEnvironmentError(RankwiseError, ValueError):
    """A launcher's variables are incomplete, contradictory or unreadable."""


class TopologyError(RankwiseError, ValueError):
    """The numbers that place a rank in its world do not fit together."""


class InvalidArgumentError(RankwiseError, ValueError):
    """An argument cannot be used; raised before anything is sent."""


class PayloadTypeError(RankwiseError, TypeError):
    """This operation is not defined for a value of this type."""


class MissingDependencyError(RankwiseError, ModuleNotFoundError):
    """This interpreter lacks a package that rankwise cannot do without: torch."""


class NotJoinedError(RankwiseError, RuntimeError):
    """The world is larger than one and this process has not joined it."""

    @classmethod
    def forked(cls, rank: int) -> NotJoinedError:
        return cls(
            f"this process was forked from rank {rank} and is no rank itself; "
            "only the process that called rankwise.init() can take part in collectives"
        )

    @classmethod
    def destroyed(cls) -> NotJoinedError:
        return cls("the process group was destroyed by other code; call rankwise.init() again")


class JoinError(RankwiseError, RuntimeError):
    """The ranks could not meet."""


class JoinTimeoutError(JoinError, TimeoutError):
    """The ranks did not meet in time."""


class CollectiveError(RankwiseError, RuntimeError):
    """A collective failed: a rank died, or did not take part."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Not all ranks took part in time."""


class MismatchError(CollectiveError, ValueError):
    """The calls of the ranks in one collective do not match."""


class StoreError(RankwiseError, RuntimeError):
    """The store of the session cannot be used: its server has ended, or no rank is left that could set a key."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key of the session's store was not set in time."""


class RemoteRankError(RankwiseError, RuntimeError):
    """Another rank raised before it could take part.

    Attributes:
        rank: The global rank that raised.
        host: The host it runs on.
        raised: The class and the first line of the message of its exception: "ValueError: no data".
        traceback: Its traceback, as text.
    """

    def __init__(self, *, rank: int, host: str, raised: str, traceback: str) -> None:
        self.rank = rank
        self.host = host
        self.raised = raised
        self.traceback = traceback
        super().__init__(f"rank {rank} on {host} raised {raised}\n\nTraceback of rank {rank}:\n{traceback}")

    def __reduce__(self) -> tuple[object, ...]:
        make = functools.partial(
            type(self), rank=self.rank, host=self.host, raised=self.raised, traceback=self.traceback
        )
        return make, (), self.__dict__


class LaunchError(RankwiseError, RuntimeError):
    """A world could not be started."""


class LaunchTimeoutError(LaunchError, TimeoutError):
    """The ranks of a launch did not end in time, and were stopped."""


def shortened(text: str, most: int) -> str:
    """Return a text without its middle, if it has more than so many characters.

    Example:
        >>> shortened("abcdefgh", 4)
        'ab\\n... (4 characters left out) ...\\ngh'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"


def shown(value: object, most: int = 100) -> str:
    """Return a value for a message: its repr, in one line and shortened; its class if it has none, or has tensors.

    Example:
        >>> shown([1, 2]), shown(10**5000)
        ('[1, 2]', '<int>')
    """
    kind = type(value)
    try:
        # A tensor may be large, on a device that is busy, or have no memory to read, which would crash the process.
        text = f"<{kind.__qualname__}>" if _has_tensors(value) else " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - whatever a class raises; of integers beyond 4,300 digits a ValueError
        return f"<{kind.__qualname__}>"
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def _has_tensors(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return hasattr(type(value), "data_ptr")


def summary(error: BaseException) -> str:
    """Return an error's class and the first line of its message, as the last line of a traceback shows them."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in {"builtins", "__main__"}:
        name = f"{kind.__module__}.{name}"
    lines = message_of(error).strip().splitlines()
    if not lines:
        return name
    line = lines[0].rstrip()
    return f"{name}: {line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + '...'}"


def message_of(error: object) -> str:
    """Return the message of an error, or of the argument of sys.exit(), even if its `__str__` raises."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - whatever it is: this error is being reported, not that one
        return f"<{type(error).__qualname__}.__str__ failed>"


def printable(text: str) -> str:
    """Return a text with its control characters escaped, so that a terminal does not interpret them.

    Newlines and tabs are kept.

    Example:
        >>> printable("host\\x1b[2J")
        'host\\\\x1b[2J'
    """
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How one rank ended.

    Attributes:
        rank: The global rank.
        host: The host it ran on.
        exitcode: Its exit code; the negative number of the signal that killed it.
        raised: The class and the first line of the message of its exception, or "" if it raised nothing.
        traceback: Its traceback as text, or "" if it left none.
        stopped: It was stopped by the launcher, because another rank had failed.
        lost: Why nobody knows how it ended, "" otherwise: its node is down, for example. The exit code is 1 then.
    """

    rank: int
    host: str
    exitcode: int
    raised: str = ""
    traceback: str = ""
    stopped: bool = False
    lost: str = ""


class RankFailedError(LaunchError):
    """A rank ended with an error, and the others were stopped.

    Attributes:
        failures: Every rank that failed, the first in time first.
        attempts: The failures of each attempt, if ranks were restarted; the last are `failures`.
        rank: The global rank that failed first.
        host: Its host.
        exitcode: Its exit code; the negative number of the signal that killed it.
        traceback: Its traceback as text, or "" if it left none.
    """

    def __init__(
        self, message: str, *, failures: Sequence[RankFailure], earlier: Sequence[Sequence[RankFailure]] = ()
    ) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.attempts = (*map(tuple, earlier), self.failures)
        first = self.failures[0]
        self.rank = first.rank
        self.host = first.host
        self.exitcode = first.exitcode
        self.traceback = first.traceback

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), str(self), failures=self.failures), (), self.__dict__
