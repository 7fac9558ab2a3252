"""pytest-rerunfailures, which runs a failed test again: each time in ranks.

The plugin decides by its options and its marker, as always. The function with which it runs the phases of a test is
replaced, so that it receives the merged reports of all ranks, each with the error that was raised first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

from rankwise.testing._plugin.messages import PHASES

if TYPE_CHECKING:
    from rankwise.testing._plugin.results import WorldResult

_MODULE: Final = "pytest_rerunfailures"
# The plugin's name of pytest's function that runs the phases of a test.
_RUNS_PHASES: Final = "runtestprotocol"
_MAKEREPORT: Final = "pytest_runtest_makereport"

# Runs a test in ranks once, and returns its reports and, if it was started, its result.
RunOnce = Callable[[], "tuple[list[pytest.TestReport], WorldResult | None]"]


class Reruns:
    """The plugin pytest-rerunfailures, if this run of pytest has it."""

    def __init__(self, config: pytest.Config) -> None:
        self._manager = config.pluginmanager
        plugins = self._manager.list_name_plugin()
        self._plugin: Any = next((plugin for _, plugin in plugins if getattr(plugin, "__name__", "") == _MODULE), None)

    def handles(self, item: pytest.Item) -> bool:
        """Return whether the plugin runs a test."""
        return self._plugin is not None and bool(self._plugin.get_reruns_count(item))

    def run(self, item: pytest.Item, nextitem: pytest.Item | None, run_once: RunOnce) -> None:
        """Let the plugin run a test, as often as its rules require, and report it."""

        def run_phases(item: pytest.Item, *, nextitem: pytest.Item | None, log: bool) -> list[pytest.TestReport]:  # noqa: ARG001 - as pytest calls it
            reports, world_result = run_once()
            if world_result is not None and world_result.pytest_exit is not None:
                for report in reports:
                    item.ihook.pytest_runtest_logreport(report=report)
                pytest.exit(*world_result.pytest_exit)
            for report in reports:
                if type(report) is not pytest.TestReport:  # of a subtest, which pytest reports at once
                    item.ihook.pytest_runtest_logreport(report=report)
            return [self._made(item, report, world_result) for report in reports if type(report) is pytest.TestReport]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._plugin, _RUNS_PHASES, run_phases)
            self._plugin.pytest_runtest_protocol(item=item, nextitem=nextitem)

    def _made(
        self, item: pytest.Item, report: pytest.TestReport, world_result: WorldResult | None
    ) -> pytest.TestReport:
        """Return a report as the plugin's hook around the making of reports returns it.

        The hook reads the error from the call. Of all other plugins, none is called.
        """
        error = _first_error(report, world_result) if report.failed else None
        call = pytest.CallInfo.from_call(lambda: _raise(error), report.when or PHASES[0])
        fixed = _FixedReport(report)
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not self._plugin]
        self._manager.register(fixed)  # after `others`, so that it is called
        try:
            caller = self._manager.subset_hook_caller(_MAKEREPORT, others)
            made: pytest.TestReport = caller(item=item, call=call)
        finally:
            self._manager.unregister(fixed)
        return made


class _FixedReport:
    """The hook that makes reports, for a report that exists already."""

    def __init__(self, report: pytest.TestReport) -> None:
        self._report = report

    def pytest_runtest_makereport(self) -> pytest.TestReport:
        return self._report


def _first_error(report: pytest.TestReport, world_result: WorldResult | None) -> BaseException:
    """Return the error that was raised first in a phase, or one of the same name if it cannot be unpickled here."""
    results = () if world_result is None else world_result.by_rank.values()
    phases = [result.phases[report.when] for result in results if report.when in result.phases]
    errors = sorted(
        (phase.is_consequence, phase.time_ns, phase.error, phase.error_text) for phase in phases if phase.error_text
    )
    if not errors:
        return RuntimeError(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longreprtext))
    from rankwise._pickling import loads  # noqa: PLC0415 - imports cloudpickle

    _, _, pickled, text = errors[0]
    if pickled:
        with contextlib.suppress(Exception):  # of any class: unpickling runs code of the test's modules
            error: BaseException = loads(pickled)
            return error
    name, _, message = text.partition(": ")
    error_of_that_name: type[BaseException] = type(name, (Exception,), {})
    return error_of_that_name(message)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
