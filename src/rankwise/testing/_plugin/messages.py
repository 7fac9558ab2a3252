"""The protocol between pytest's own process and the ranks of one test.

Each rank has one connection. pytest's process is the left side; several tests follow each other on one connection::

    RunTest          ->                              which test, in which world
                     <-  Started                     the rank has collected the test's file and found the test
                     <-  PhaseReport("setup")
    True or False    ->                              all ranks have reported; False: some rank's setup failed, so no
                                                     rank runs the body
                     <-  PhaseReport("call")
    True             ->                              all ranks have reported; fixtures may be torn down
                     <-  PhaseReport("teardown")
                     <-  Finished                    the next RunTest may follow
    None             ->                              no more tests: end the session of pytest, and the process

Each reply to a PhaseReport is a barrier, so no rank tears down a fixture that another rank still uses. A rank whose
setup or body did not pass receives its reply immediately: it leaves the session then, and that ends the collectives in
which the others wait for it. The next barrier is without it.

A rank may also send SubtestReport, RecordedWarning and DebuggerEvent at any time. It sends Aborted, and nothing more of
this test, if it cannot run the test to its end. A rank that receives None, or whose connection is closed, while it
waits for a reply ends, since the test was given up. The last message of a rank that ends by itself is
the `WorkerResult` of the fork server's protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PHASES: Final = ("setup", "call", "teardown")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of a run of pytest, which each rank has from its start.

    Attributes:
        options: The parsed options of pytest's command line.
        args: Options that disable plugins, and the command line's paths, whose `conftest.py` files are loaded first.
        workerinput: The values that plugins give to ranks, as they give them to workers of pytest-xdist.
        markers: The markers that are registered in pytest's own process.
        coverage: The options of the coverage measurement; empty if nothing is measured.
        finish_lock: Path of the file that ranks lock while plugins write files at the end of the session.
        output_lock: Path of the file that ranks lock while they write to pytest's output; "" if output is captured.
    """

    options: dict[str, Any]
    args: list[str]
    workerinput: dict[str, Any]
    markers: list[str]
    coverage: dict[str, Any]
    finish_lock: str
    output_lock: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemId:
    """The identity of a test, the same in all processes.

    Attributes:
        path: Its file.
        name: Its name in that file, as pytest writes it: "TestClass::test_it[4ranks]".
    """

    path: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTest:
    """A request to run a test.

    Attributes:
        item_id: The test.
        next_item_id: The next test of this world, for which fixtures of wider scope are kept.
        environ: The variables that specify the rank and its world.
        tmp_path: The folder of the fixture `tmp_path`, created when a rank requests the fixture.
    """

    item_id: ItemId
    next_item_id: ItemId | None
    environ: Mapping[str, str]
    tmp_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A rank has found the test, and starts its setup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """The result of one phase of a test on a rank.

    Attributes:
        when: "setup", "call" or "teardown".
        report: pytest's report, as pytest serializes it.
        is_consequence: The error reports that another rank has failed.
        time_ns: When the phase ended, on the host's monotonic clock.
        error_text: The error, as "ValueError: no data"; "" if there was none.
        error: The error, pickled; b"" if it cannot be pickled, or no plugin needs it.
    """

    when: str
    report: dict[str, Any]
    is_consequence: bool = False
    time_ns: int = 0
    error_text: str = ""
    error: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtestReport:
    """The report of a subtest, which is beside those of the phases.

    Attributes:
        report: pytest's report, as pytest serializes it.
    """

    report: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWarning:
    """A warning on a rank.

    Attributes:
        text: Its message.
        category: The name of its class.
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
    """A debugger was entered, or left, on a rank.

    Attributes:
        entered: Entered; otherwise left.
    """

    entered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A rank has run the test to its end.

    Attributes:
        leaks: Descriptions of the state that the test has left behind.
        keeps_group: A fixture of wider scope keeps a process group open, and needs the store where its ranks met.
    """

    leaks: tuple[str, ...] = ()
    keeps_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """A rank cannot run the test: the test was not found, or pytest failed.

    Attributes:
        text: The reason.
        pytest_exit: The reason and exit status passed to `pytest.exit`, if it was called.
    """

    text: str
    pytest_exit: tuple[str, int | None] | None = None
