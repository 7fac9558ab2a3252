"""The hooks of pytest's own process: they select the tests that run in ranks, run them there and report them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

from rankwise._dependencies import has_posix, missing_posix, require_torch
from rankwise.errors import InvalidArgumentError, LaunchError, MissingDependencyError
from rankwise.testing._plugin import snapshots
from rankwise.testing._plugin.marker import SERIAL, read_marker, world_size_of
from rankwise.testing._plugin.reruns import Reruns

if TYPE_CHECKING:
    from rankwise.testing._plugin.results import WorldResult
    from rankwise.testing._plugin.worlds import Worlds

_LEAKS_SHOWN: Final = 10
# What needs torch and a POSIX system, in messages.
_NEEDS: Final = "a test that runs in ranks"
# Options with which pytest runs no test.
_WITHOUT_TESTS: Final = ("collectonly", "setuponly", "setupplan")


class Scheduler:
    """The hooks of pytest's own process.

    While a test runs, `_current` is the function that runs it to its end, or the error that has prevented its start.
    `_last` is the last test in ranks; `_last_of_all` may be one that runs in this process alone.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worlds: Worlds | None = None
        # The tests that run in ranks, each with the next one.
        self._next_items: dict[pytest.Item, pytest.Item | None] = {}
        self._start_errors: dict[pytest.Item, str] = {}
        self._last: pytest.Item | None = None
        self._last_of_all: pytest.Item | None = None
        self._current: Callable[[], WorldResult] | str | None = None
        self._reruns = Reruns(config)
        self._note = ""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        # Innermost, so that ranks have written their coverage before it is combined.
        if not any(map(self._config.getoption, _WITHOUT_TESTS)):
            self._prepare(session)
        try:
            return (yield)
        finally:
            problems = () if self._worlds is None else self._worlds.close()
            # A worker of pytest-xdist can report on the test that it has run last, and on no other.
            item = self._last_of_all if hasattr(self._config, "workerinput") else self._last
            if problems and item is not None:
                from rankwise.testing._plugin.merged_report import error_report  # noqa: PLC0415 - for this alone

                report = error_report(item, "\n".join(problems), "teardown")
                item.ihook.pytest_runtest_logreport(report=report)

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_protocol")
    def pytest_runtest_protocol_outermost(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Start a test in ranks, before pytest-timeout starts its clock, which is not to include the start of ranks."""
        self._last_of_all = item
        if item not in self._next_items and item not in self._start_errors:
            return (yield)
        if not self._reruns.handles(item):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._last = item
        self._current = self._start(item, nextitem)
        try:
            return (yield)
        finally:
            self._current = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if self._current is None:
            return None
        started: list[Callable[[], WorldResult] | str] = [self._current]

        def run_once() -> tuple[list[pytest.TestReport], WorldResult | None]:
            return self._finish(item, started.pop() if started else self._start(item, nextitem))

        pytest_exit = None
        if self._reruns.handles(item):
            self._reruns.run(item, nextitem, run_once)
        else:
            reports, world_result = run_once()
            pytest_exit = None if world_result is None else world_result.pytest_exit
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
        for report in _tear_down(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        if not self._reruns.handles(item):
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if pytest_exit is not None:
            pytest.exit(*pytest_exit)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:  # noqa: ANN401 - of pytest-timeout
        """Stop the ranks where pytest-timeout's thread would end this whole process, which does not hang itself."""
        if item is not self._last or self._current is None or self._worlds is None or settings.method != "thread":
            return None
        self._worlds.limit(settings.timeout, f"Timeout (>{settings.timeout}s) from pytest-timeout")
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._note = snapshots.keep_snapshots_of_worker(self._config, node) or self._note

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._show_interrupted(terminalreporter)
        if self._note:
            terminalreporter.line(self._note)
        leaks = [] if self._worlds is None else self._worlds.leaks
        if leaks:
            tests = len({nodeid for nodeid, _ in leaks})
            terminalreporter.section("ranks that were replaced")
            terminalreporter.line(f"{tests} tests left something behind, so the next one waited for new processes:")
            for nodeid, text in leaks if self._config.get_verbosity() > 0 else leaks[:_LEAKS_SHOWN]:
                terminalreporter.line(f"{nodeid}: {text}")

    def _show_interrupted(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the stacks of ranks at Ctrl-C."""
        if self._worlds is not None and self._worlds.interrupted and self._last is not None:
            from rankwise.testing._plugin import tracebacks  # noqa: PLC0415 - for this alone

            terminalreporter.section("ranks that were interrupted")
            terminalreporter.line(self._last.nodeid)
            for title, stack in tracebacks.grouped(self._worlds.interrupted, str(self._last.path)):
                terminalreporter.line(f"{title}\n{stack}")

    def _prepare(self, session: pytest.Session) -> None:
        """Select the tests that run in ranks, each with the next one, and start the fork server for them."""
        next_item: pytest.Item | None = None
        for item in reversed(session.items):
            try:
                size = world_size_of(item)
            except InvalidArgumentError as error:
                self._start_errors[item] = str(error)
                continue
            if size == SERIAL:
                continue
            self._next_items[item] = next_item
            next_item = item
        if self._next_items:
            try:
                require_torch(_NEEDS)
                if not has_posix():
                    raise missing_posix(_NEEDS)
                from rankwise.testing._plugin.worlds import Worlds  # noqa: PLC0415 - imports torch

                self._worlds = Worlds(self._config)
            except (MissingDependencyError, LaunchError) as error:
                if not hasattr(self._config, "workerinput"):
                    raise pytest.UsageError(str(error)) from None
                # It would be an internal error of pytest-xdist, without these words.
                self._start_errors |= dict.fromkeys(self._next_items, str(error))
                return
            self._note = snapshots.keep_snapshots_of_ranks(self._config, list(self._next_items))

    def _start(self, item: pytest.Item, nextitem: pytest.Item | None) -> Callable[[], WorldResult] | str:
        """Start a test in ranks, and return the function that runs it to its end, or the error."""
        if item in self._start_errors:
            return self._start_errors[item]
        marker, worlds = read_marker(item), self._worlds
        if marker is None or worlds is None:
            raise TypeError(f"{item.nodeid} is not a test for ranks")
        try:
            return worlds.begin(item, marker, int(world_size_of(item)), self._next(item, nextitem))
        except Exception:  # noqa: BLE001 - any error is reported as this test's, and the other tests run
            return traceback.format_exc()

    def _finish(
        self, item: pytest.Item, finish: Callable[[], WorldResult] | str
    ) -> tuple[list[pytest.TestReport], WorldResult | None]:
        """Run a test to its end, and return its reports, and its result if it was started."""
        from rankwise.testing._plugin.merged_report import error_report, merged_reports  # noqa: PLC0415 - not in every project

        if isinstance(finish, str):
            return [error_report(item, finish)], None
        try:
            world_result = finish()
            return merged_reports(item, world_result), world_result
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - as above; pytest-timeout raises the other one
            return [error_report(item, traceback.format_exc())], None

    def _next(self, item: pytest.Item, nextitem: pytest.Item | None) -> pytest.Item | None:
        """Return the next test that runs in ranks, if it is known, and if fixtures of wider scope are kept for it."""
        # A worker of pytest-xdist runs its tests in another order than that of their collection.
        next_item = nextitem if hasattr(self._config, "workerinput") else self._next_items[item]
        if next_item is None or next_item not in self._next_items:
            return None
        # A fixture of wider scope belongs to the world in which it was made. For a test that comes twice in a row
        # nothing is kept: on ranks it is one item, and pytest cannot keep the fixtures of an item for itself.
        is_same_world = world_size_of(next_item) == world_size_of(item)
        return next_item if is_same_world and next_item.nodeid != item.nodeid else None


def _tear_down(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Tear down fixtures that tests of this process have kept for more tests of the module or class.

    Returns:
        A report of the error, if there was one.
    """
    if item.session.shouldfail or item.session.shouldstop:
        nextitem = None
    call = pytest.CallInfo.from_call(
        lambda: item.session._setupstate.teardown_exact(nextitem),  # noqa: SLF001 - as pytest's runner does
        "teardown",
        reraise=(pytest.exit.Exception, KeyboardInterrupt),
    )
    # Without the hook `pytest_runtest_makereport`: plugins expect there that this process has run the test.
    return [] if call.excinfo is None else [pytest.TestReport.from_item_and_call(item, call)]
