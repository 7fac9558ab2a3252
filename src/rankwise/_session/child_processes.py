"""What a child process of multiprocessing gets to know of the rank that has started it.

A forked child has a copy of everything. One of another start method, such as a spawned worker of a data loader, has the
environment of the rank, which says nothing where the numbers came from arguments of `init()` or from a process group of
other code: it would take itself for a world of one, and each rank would read all data. Nor has it the definitions of
`__main__` where the rank itself got these by value, as from a notebook.

Both travel with the data that multiprocessing sends to a child. Not with the environment: a program, or another job,
that the rank starts must not take them over.
"""

from __future__ import annotations

import io
import multiprocessing.process
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rankwise._environment.facts import LaunchEnvironment
from rankwise.errors import RankwiseError

# In the configuration of a process, which multiprocessing copies to its children, and pickles before their target.
_KEY: Final = "rankwise"


@dataclass(frozen=True, slots=True)
class ReceivedRank:
    """What this process has received. It goes on to children of this process, which may use nothing of rankwise.

    Attributes:
        reading: The facts of the rank; None for a world of one.
        environment: What the environment of the rank said.
        definitions: Those of `__main__`, as `Definitions`; None if there are none that the child could not import.
    """

    reading: LaunchEnvironment | None
    environment: LaunchEnvironment | None
    definitions: tuple[bytes, str] | None

    def __reduce__(self) -> tuple[Callable[..., ReceivedRank], tuple[Any, ...]]:
        return _received, (self.reading, self.environment, self.definitions)


class _OwnRank:
    """The rank of this process: pickled when a child is started, as what is known then."""

    def __init__(self, facts: Callable[[], tuple[LaunchEnvironment, LaunchEnvironment]]) -> None:
        self._facts = facts

    def __reduce__(self) -> tuple[Callable[..., ReceivedRank], tuple[Any, ...]]:
        return _received, (*self._known(), _definitions_of_main())

    def _known(self) -> tuple[LaunchEnvironment | None, LaunchEnvironment | None]:
        try:
            reading, environment = self._facts()
        except RankwiseError:
            return None, None
        return (reading, environment) if reading.world_size.value > 1 else (None, None)


def tell_children(facts: Callable[[], tuple[LaunchEnvironment, LaunchEnvironment]]) -> None:
    """Let the children of multiprocessing know this rank.

    Args:
        facts: Returns the facts of this rank, and what its environment says.
    """
    _configuration()[_KEY] = _OwnRank(facts)


def received_reading(environment: LaunchEnvironment) -> LaunchEnvironment:
    """Return the facts of the rank that has started this process, or else those of the environment.

    A child that has set variables of its own, as of a rank in another world, is not described by its parent.
    """
    found = _received_rank
    return found.reading if found is not None and found.reading and found.environment == environment else environment


def _configuration() -> dict[str, Any]:
    found: dict[str, Any] = getattr(multiprocessing.process.current_process(), "_config", {})
    return found


_received_rank: ReceivedRank | None = None


def _received(
    reading: LaunchEnvironment | None, environment: LaunchEnvironment | None, definitions: tuple[bytes, str] | None
) -> ReceivedRank:
    """Take over what a parent has sent, in a child, before its target is unpickled."""
    global _received_rank  # noqa: PLW0603 - of the process
    _received_rank = ReceivedRank(reading, environment, definitions)
    if definitions is not None:
        from rankwise._pickling import Definitions, Unpickler  # noqa: PLC0415 - few children need them

        pickled, problem = definitions
        Unpickler(io.BytesIO(pickled), Definitions(problem=problem), adopting=True).load()
    return _received_rank


def _definitions_of_main() -> tuple[bytes, str] | None:
    """Return the definitions of `__main__`, if it has some and no child could import it."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None:
        return None
    from rankwise._pickling import Definitions  # noqa: PLC0415 - likewise

    own = {
        name: value
        for name, value in vars(main).items()
        if getattr(value, "__module__", "") == "__main__" and getattr(value, "__qualname__", "") == name
    }
    found = Definitions.of(own)
    return (found.pickled, found.problem) if found.pickled else None
