"""pytest-rerunfailures, which runs a test again that has failed: in ranks, each time.

The plugin decides as ever, by its options and its marker. What runs the phases of a test for it is replaced, so that it
gets the reports of the world, each with the error that the ranks raised first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

from rankwise.testing._plugin.messages import PHASES

if TYPE_CHECKING:
    from rankwise.testing._plugin.runner import WorldResult

_MODULE: Final = "pytest_rerunfailures"
# What runs the phases of a test there.
_RUNS_PHASES: Final = "runtestprotocol"
_MAKEREPORT: Final = "pytest_runtest_makereport"

# Runs a test in ranks once, and returns its reports and, if it began, how it went.
RunOnce = Callable[[], "tuple[list[pytest.TestReport], WorldResult | None]"]


class Reruns:
    """The plugin that runs failed tests again, if this run of pytest has it."""

    def __init__(self, config: pytest.Config) -> None:
        self._manager = config.pluginmanager
        plugins = self._manager.list_name_plugin()
        self._plugin: Any = next((plugin for _, plugin in plugins if getattr(plugin, "__name__", "") == _MODULE), None)

    def leads(self, item: pytest.Item) -> bool:
        """Return whether the plugin runs a test."""
        return self._plugin is not None and bool(self._plugin.get_reruns_count(item))

    def lead(self, item: pytest.Item, nextitem: pytest.Item | None, attempt: RunOnce) -> None:
        """Let the plugin run a test, as often as it finds right, and report it."""

        def phases(item: pytest.Item, *, nextitem: pytest.Item | None, log: bool) -> list[pytest.TestReport]:  # noqa: ARG001 - as pytest calls it
            reports, outcome = attempt()
            if outcome is not None and outcome.stop is not None:
                for report in reports:
                    item.ihook.pytest_runtest_logreport(report=report)
                pytest.exit(*outcome.stop)
            for report in reports:
                if type(report) is not pytest.TestReport:  # of a subtest, which pytest reports at once
                    item.ihook.pytest_runtest_logreport(report=report)
            return [self._seen(item, report, outcome) for report in reports if type(report) is pytest.TestReport]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._plugin, _RUNS_PHASES, phases)
            self._plugin.pytest_runtest_protocol(item=item, nextitem=nextitem)

    def _seen(self, item: pytest.Item, report: pytest.TestReport, outcome: WorldResult | None) -> pytest.TestReport:
        """Show the plugin a report where it looks at those of pytest, with the error; no other plugin sees it."""
        error = _error(report, outcome) if report.failed else None
        call = pytest.CallInfo.from_call(lambda: _raise(error), report.when or PHASES[0])
        maker = _FixedReport(report)
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not self._plugin]
        self._manager.register(maker)
        try:
            caller = self._manager.subset_hook_caller(_MAKEREPORT, others)
            seen: pytest.TestReport = caller(item=item, call=call)
        finally:
            self._manager.unregister(maker)
        return seen


class _FixedReport:
    """The hook that makes reports, for one that is there already."""

    def __init__(self, report: pytest.TestReport) -> None:
        self._report = report

    def pytest_runtest_makereport(self) -> pytest.TestReport:
        return self._report


def _error(report: pytest.TestReport, outcome: WorldResult | None) -> BaseException:
    """Return what the ranks raised first in a phase; what stands for it, if it does not exist in this process."""
    attempts = () if outcome is None else outcome.attempts.values()
    phases = [attempt.phases[report.when] for attempt in attempts if report.when in attempt.phases]
    raised = sorted((phase.consequence, phase.time_ns, phase.error, phase.raised) for phase in phases if phase.raised)
    if not raised:
        return RuntimeError(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext))
    from rankwise._pickling import loads  # noqa: PLC0415 - imports cloudpickle

    _, _, pickled, text = raised[0]
    if pickled:
        with contextlib.suppress(Exception):  # whatever reading it raises: the class is another one here
            error: BaseException = loads(pickled)
            return error
    name, _, message = text.partition(": ")
    error_of_that_name: type[BaseException] = type(name, (Exception,), {})
    return error_of_that_name(message)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
