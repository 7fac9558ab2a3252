"""Sending tests to ranks, from pytest's own process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

from rankwise._dependencies import require_torch
from rankwise.errors import InvalidArgumentError, MissingDependencyError
from rankwise.testing._plugin import snapshots
from rankwise.testing._plugin.marker import SERIAL, read_marker, world_size_of
from rankwise.testing._plugin.reruns import Reruns

if TYPE_CHECKING:
    from rankwise.testing._plugin.runner import WorldResult
    from rankwise.testing._plugin.worlds import Worlds

_TESTS_NAMED: Final = 10
_WITHOUT_TESTS: Final = ("collectonly", "setuponly", "setupplan")


class Scheduler:
    """The hooks of pytest's own process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worlds: Worlds | None = None
        self._following: dict[pytest.Item, pytest.Item | None] = {}
        self._problems: dict[pytest.Item, str] = {}
        self._last: pytest.Item | None = None
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
            if problems and self._last is not None:
                from rankwise.testing._plugin.merged_report import error_report  # noqa: PLC0415 - imports torch

                report = error_report(self._last, "\n".join(problems), "teardown")
                self._last.ihook.pytest_runtest_logreport(report=report)

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_protocol")
    def pytest_runtest_protocol_outermost(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Let ranks begin a test, before pytest-timeout does: it is to measure the test, not the start of ranks."""
        if item not in self._following and item not in self._problems:
            return (yield)
        if not self._reruns.leads(item):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._last = item
        self._current = self._problems.get(item) or self._begun(item, nextitem)
        try:
            return (yield)
        finally:
            self._current = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if self._current is None:
            return None
        begun: list[Callable[[], WorldResult] | str] = [self._current]

        def attempt() -> tuple[list[pytest.TestReport], WorldResult | None]:
            return self._finished(item, begun.pop() if begun else self._begun(item, nextitem))

        stop = None
        if self._reruns.leads(item):
            self._reruns.lead(item, nextitem, attempt)
        else:
            reports, outcome = attempt()
            stop = None if outcome is None else outcome.stop
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
        for report in _put_away(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        if not self._reruns.leads(item):
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if stop is not None:
            pytest.exit(*stop)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:  # noqa: ANN401 - of pytest-timeout
        """Stop ranks where pytest-timeout's thread would end this whole process, which is not what hangs."""
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
        left = [] if self._worlds is None else self._worlds.left
        if left:
            tests = len({nodeid for nodeid, _ in left})
            terminalreporter.section("ranks that were replaced")
            terminalreporter.line(f"{tests} tests left something behind, so the next one waited for new processes:")
            for nodeid, text in left if self._config.get_verbosity() > 0 else left[:_TESTS_NAMED]:
                terminalreporter.line(f"{nodeid}: {text}")

    def _show_interrupted(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show where ranks were when Ctrl-C came."""
        if self._worlds is not None and self._worlds.interrupted and self._last is not None:
            from rankwise.testing._plugin import tracebacks  # noqa: PLC0415 - for this alone

            terminalreporter.section("ranks that were interrupted")
            terminalreporter.line(self._last.nodeid)
            for title, stack in tracebacks.grouped(self._worlds.interrupted, str(self._last.path)):
                terminalreporter.line(f"{title}\n{stack}")

    def _prepare(self, session: pytest.Session) -> None:
        """Find out which tests run in ranks, and which of them comes next; start the ranks' server for them."""
        following: pytest.Item | None = None
        for item in reversed(session.items):
            try:
                size = world_size_of(item)
            except InvalidArgumentError as error:
                self._problems[item] = str(error)
                continue
            if size == SERIAL:
                continue
            self._following[item] = following
            following = item
        if self._following:
            try:
                require_torch("a test that runs in ranks")
            except MissingDependencyError as error:
                raise pytest.UsageError(str(error)) from None
            from rankwise.testing._plugin.worlds import Worlds  # noqa: PLC0415 - imports torch

            self._worlds = Worlds(self._config)
            self._note = snapshots.keep_snapshots_of_ranks(self._config, list(self._following))

    def _begun(self, item: pytest.Item, nextitem: pytest.Item | None) -> Callable[[], WorldResult] | str:
        """Return what runs a test to its end, now that ranks have begun it, or why they have not."""
        ranks, worlds = read_marker(item), self._worlds
        if ranks is None or worlds is None:
            raise TypeError(f"{item.nodeid} is not a test for ranks")
        try:
            return worlds.begin(item, ranks, int(world_size_of(item)), self._next(item, nextitem))
        except Exception:  # noqa: BLE001 - whatever it is, it is this test's, and the others go on
            return traceback.format_exc()

    def _finished(
        self, item: pytest.Item, finish: Callable[[], WorldResult] | str
    ) -> tuple[list[pytest.TestReport], WorldResult | None]:
        """Return what to report of a test, and how it went, if it has begun."""
        from rankwise.testing._plugin.merged_report import error_report, merged_reports  # noqa: PLC0415 - imports torch

        if isinstance(finish, str):
            return [error_report(item, finish)], None
        try:
            outcome = finish()
            return merged_reports(item, outcome), outcome
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - as above; pytest-timeout raises the other one
            return [error_report(item, traceback.format_exc())], None

    def _next(self, item: pytest.Item, nextitem: pytest.Item | None) -> pytest.Item | None:
        """Return the next test that runs in ranks, if it is known, and if fixtures of wider scope may stay for it."""
        # A worker of pytest-xdist runs its tests in another order than that in which it has found them.
        following = nextitem if hasattr(self._config, "workerinput") else self._following[item]
        if following is None or following not in self._following:
            return None
        # A fixture of wider scope belongs to the world that it was made in. A test that comes twice in a row begins
        # anew: ranks know it by its name.
        return (
            following if world_size_of(following) == world_size_of(item) and following.nodeid != item.nodeid else None
        )


def _put_away(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """End what tests of this process have kept for more tests of the module, or class, and return what went wrong."""
    if item.session.shouldfail or item.session.shouldstop:
        nextitem = None
    call = pytest.CallInfo.from_call(
        lambda: item.session._setupstate.teardown_exact(nextitem),  # noqa: SLF001 - as the runner does after its own
        "teardown",
        reraise=(pytest.exit.Exception, KeyboardInterrupt),
    )
    # Not by the hook: plugins expect there that this process has run the test.
    return [] if call.excinfo is None else [pytest.TestReport.from_item_and_call(item, call)]
