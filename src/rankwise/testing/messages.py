"""What pytest's process and the ranks tell each other. In between, a bool: whether to go on with the next phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

PHASES: Final = ("setup", "call", "teardown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a test is found.

    Attributes:
        path: Its file.
        nodeid: Its name in pytest.
    """

    path: str
    nodeid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A test that a rank is to run.

    Attributes:
        place: Which one.
        following: The next one of this rank, for which fixtures of wider scope are kept.
        environ: The variables that tell the rank its place in the world.
        folder: What `tmp_path` is, "" if the test does not ask for one.
    """

    place: Place
    following: Place | None
    environ: Mapping[str, str]
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A rank has found the test, and begins with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How one phase of a test went on a rank.

    Attributes:
        when: "setup", "call" or "teardown".
        report: Pytest's report, as pytest serialises it.
        consequence: What was raised tells of another rank's end.
        time_ns: When it was over, on the host's monotonic clock.
    """

    when: str
    report: dict[str, Any]
    consequence: bool = False
    time_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A rank has ended a test.

    Attributes:
        left: What the test has left behind, in words.
    """

    left: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A rank cannot run the test: it is not there, or pytest failed.

    Attributes:
        text: Why.
    """

    text: str
