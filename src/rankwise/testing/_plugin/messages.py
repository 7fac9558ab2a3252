"""What pytest's process and the ranks tell each other. In between, a bool: whether to go on with the next phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PHASES: Final = ("setup", "call", "teardown")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A run of pytest, as its ranks have to know it.

    Attributes:
        options: Of pytest's command line.
        args: Which plugins are switched off, and what pytest was asked to collect, whose `conftest.py` files count from
            the beginning.
        workerinput: What plugins have given to ranks, as they give it to workers of pytest-xdist.
        markers: All that pytest's own process knows.
        measured: What of the coverage is measured; nothing, if it is empty.
        ends: The file by which ranks take turns to write at their end.
        turns: The file by which ranks take turns at pytest's own output; "" if what they print is captured.
    """

    options: dict[str, Any]
    args: list[str]
    workerinput: dict[str, Any]
    markers: list[str]
    measured: dict[str, Any]
    ends: str
    turns: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemId:
    """Where a test is found.

    Attributes:
        path: Its file.
        name: Its name in that file, as pytest writes it: "TestClass::test_it[4ranks]".
    """

    path: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTest:
    """A test that a rank is to run.

    Attributes:
        place: Which one.
        following: The next one of this world, for which fixtures of wider scope are kept.
        environ: The variables that tell the rank its place in the world.
        folder: What `tmp_path` is, once a rank asks for it.
    """

    place: ItemId
    following: ItemId | None
    environ: Mapping[str, str]
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A rank has found the test, and begins with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """How one phase of a test went on a rank.

    Attributes:
        when: "setup", "call" or "teardown".
        report: Pytest's report, as pytest serialises it.
        consequence: What was raised tells of another rank's end.
        time_ns: When it was over, on the host's monotonic clock.
        raised: What was raised, as "ValueError: no data"; "" if nothing was.
        error: That, pickled; b"" if it cannot be, or nobody asks for it.
    """

    when: str
    report: dict[str, Any]
    consequence: bool = False
    time_ns: int = 0
    raised: str = ""
    error: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtestReport:
    """A report that is not of a phase: of a subtest.

    Attributes:
        report: Pytest's report, as pytest serialises it.
    """

    report: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWarning:
    """A warning on a rank.

    Attributes:
        text: What it says.
        category: Its class, by name.
        filename, lineno: Where it was issued.
        when: "collect" or "runtest".
    """

    text: str
    category: str
    filename: str
    lineno: int
    when: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerEvent:
    """Somebody debugs a rank.

    Attributes:
        begins: From now on; no more, otherwise.
    """

    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A rank has ended a test.

    Attributes:
        left: What the test has left behind, in words.
        joined: A fixture of wider scope keeps a process group open, and needs the store where its ranks met.
    """

    left: tuple[str, ...] = ()
    joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """A rank cannot run the test: it is not there, or pytest failed.

    Attributes:
        text: Why.
        stop: What `pytest.exit` was called with, reason and status, if it was.
    """

    text: str
    stop: tuple[str, int | None] | None = None
