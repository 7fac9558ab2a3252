"""One report for all ranks: how many passed, the first failure, and text of several ranks shown once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from rankwise._text import ranks_text
from rankwise.errors import shortened
from rankwise.testing._plugin import tracebacks
from rankwise.testing._plugin.messages import PHASES, PhaseReport
from rankwise.testing._plugin.results import RankResult, WorldResult

# In pytest's summary of the run; the report of the test has all.
_FAILURES_IN_SUMMARY: Final = 3
# Of the output of a rank, in characters.
_LONGEST_OUTPUT: Final = 100_000
_UNEXPECTED: Final = "[XPASS(strict)]"
_FAILED: Final = "failed: "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """The failure of a phase on one rank.

    Attributes:
        summary: One line.
        location: Where it was raised; failures of one location are shown together.
        details: pytest's representation of the error, or text.
        is_consequence: Another rank has failed before, and the error reports that.
        time_ns: When it was raised, or noticed.
    """

    summary: str
    location: str
    details: Any
    is_consequence: bool
    time_ns: int


def merged_reports(item: pytest.Item, world_result: WorldResult) -> list[pytest.TestReport]:
    """Return one report for each phase that any rank began."""
    phases = [_MergedPhase(item, world_result, when) for when in PHASES]
    reports = [*_subtests(item, world_result), *(phase.report() for phase in phases if phase.results)]
    if world_result.shutdown_errors:
        reports.append(error_report(item, "\n".join(world_result.shutdown_errors), "teardown"))
    return reports


def error_report(item: pytest.Item, text: str, when: Literal["setup", "teardown"] = "setup") -> pytest.TestReport:
    """Return the report of an error before a test, or after it."""
    return pytest.TestReport(item.nodeid, item.location, _keywords(item), "failed", text, when)


def _subtests(item: pytest.Item, world_result: WorldResult) -> list[pytest.TestReport]:
    """Return the reports of subtests; of equal reports of several ranks, the first."""
    read: Callable[..., Any] = item.config.hook.pytest_report_from_serializable
    reports: dict[tuple[str, str, str], pytest.TestReport] = {}
    for rank, result in world_result.by_rank.items():
        for subtest in result.subtests:
            report = read(config=item.config, data=subtest.report)
            if report is not None:
                report.sections.append(("World", f"on rank {rank} of {len(world_result.by_rank)}"))
                reports.setdefault((repr(getattr(report, "context", "")), report.outcome, report.longreprtext), report)
    return list(reports.values())


class _MergedPhase:
    """One phase of a test on all ranks that began it."""

    def __init__(self, item: pytest.Item, world_result: WorldResult, when: str) -> None:
        self.results = {
            rank: result
            for rank, result in world_result.by_rank.items()
            if when in result.phases
            or ((result.ended or rank in world_result.stopped) and _phase_of_end(result) == when)
        }
        self._item = item
        self._world_result = world_result
        self._when = when
        read: Callable[..., Any] = item.config.hook.pytest_report_from_serializable
        self._reports: dict[int, pytest.TestReport] = {
            rank: read(config=item.config, data=result.phases[when].report)
            for rank, result in self.results.items()
            if when in result.phases
        }

    def report(self) -> pytest.TestReport:
        """Return one report for all ranks."""
        outcome, longrepr, xfail = self._verdict()
        reports = list(self._reports.values())
        report = pytest.TestReport(
            self._item.nodeid,
            self._item.location,
            _keywords(self._item),
            outcome,  # type: ignore[arg-type]  # one of the three
            longrepr,
            self._when,  # type: ignore[arg-type]
            sections=self._sections(),
            duration=max((report.duration for report in reports), default=0.0),
            start=min((report.start for report in reports), default=0.0),
            stop=max((report.stop for report in reports), default=0.0),
            user_properties=_unique(pair for report in reports for pair in report.user_properties),
        )
        for name, value in vars(reports[0]).items() if reports else ():
            if name != "wasxfail" and not hasattr(report, name):  # an attribute that a plugin has added
                setattr(report, name, value)
        if xfail is not None:
            report.wasxfail = xfail
        return report

    def _verdict(self) -> tuple[str, Any, str | None]:
        """Return the outcome, the representation of the error or skip, and the reason of xfail, if it applies.

        A world fails if any rank has failed for a reason of its own. If no rank has, it is expected to fail, or is
        skipped, if any rank is. Otherwise it has passed.
        """
        failures = self._failures()
        stopped = {
            rank: result.stack
            for rank, result in self.results.items()
            if rank in self._world_result.stopped and _phase_of_end(result) == self._when
        }
        skipped = {rank: report for rank, report in self._reports.items() if report.skipped}
        # pytest reports an expected failure as a skip with a reason in `wasxfail`.
        expected = [report for report in skipped.values() if hasattr(report, "wasxfail")]
        if expected:
            # The rank that failed as expected has left the others alone. Their errors in collectives, their deaths, the
            # kill after the grace period, and that they passed under strict xfail, all follow from that. Errors that
            # they raised themselves for another reason do not.
            failures = {
                rank: failure
                for rank, failure in failures.items()
                if not failure.is_consequence and rank in self._reports and failure.summary != _UNEXPECTED
            }
            stopped = {}
        if skipped and not stopped and all(failure.is_consequence for failure in failures.values()):
            failures = {}  # of ranks that waited in a collective for one that was skipped
        if failures or stopped:
            return "failed", self._representation(failures, stopped), None
        if expected:
            return "skipped", expected[0].longrepr, expected[0].wasxfail
        if skipped:
            return "skipped", self._skip(skipped), None
        # XPASS, not strict: a passed report with `wasxfail`.
        reasons = {getattr(report, "wasxfail", None) for report in self._reports.values()}
        return "passed", None, reasons.pop() if len(reasons) == 1 else None

    def _failures(self) -> dict[int, _Failure]:
        """Return the failure of each rank that failed: causes before consequences, and then in order of time."""
        failures = {}
        for rank, result in self.results.items():
            phase, report = result.phases.get(self._when), self._reports.get(rank)
            if phase is not None and report is not None and report.failed:
                failures[rank] = _failure(phase, report)
            elif result.ended and _phase_of_end(result) == self._when:
                summary, _, rest = result.ended.partition("\n")
                details = f"{rest}\n{tracebacks.trimmed(result.stack)}".strip()
                failures[rank] = _Failure(
                    summary=summary,
                    location=f"{summary}\n{details}",  # a death has none; equal ones are shown together
                    details=details,
                    is_consequence=False,
                    time_ns=result.ended_ns,
                )
        return dict(sorted(failures.items(), key=lambda entry: (entry[1].is_consequence, entry[1].time_ns)))

    def _representation(self, failures: Mapping[int, _Failure], stopped: Mapping[int, str]) -> ExceptionChainRepr:
        """Return all failures as one chain of errors, which pytest can show, with a summary as its message."""
        file = str(self._item.path)
        size = len(self._world_result.by_rank)
        passed = f"{size - len(failures) - len(stopped)} of {size} ranks passed"
        summary: list[str] = []
        parts: list[tuple[ReprTraceback, str | None]] = []
        for group in _by_location(failures):
            failure = failures[next(iter(group.values()))[0]]
            lines = [f"{ranks_text(ranks)} {'then ' * failure.is_consequence}{text}" for text, ranks in group.items()]
            if not summary and not failure.is_consequence:
                text, ranks = next(iter(group.items()))
                summary.append(_brief(text, ranks, size))
                summary += lines[1:]
            else:
                summary += lines
            parts.append((_text("\n".join(lines)), None))
            # The traceback of a consequence is shown only if no cause is shown above it.
            if failure.details and not (failure.is_consequence and len(summary) > len(lines)):
                parts += _tracebacks(failure.details)
        if stopped:
            summary.append(f"{self._world_result.stop_reason}: {tracebacks.summary(stopped, file)}")
            parts.append((_text(summary[-1]), None))
            parts += [(_text(f"{title}\n{stack}"), None) for title, stack in tracebacks.grouped(stopped, file)]
        shown = [*summary[:_FAILURES_IN_SUMMARY], *["..."] * (len(summary) > _FAILURES_IN_SUMMARY), passed]
        crash = ReprFileLocation(file, (self._item.location[1] or 0) + 1, "; ".join(shown))
        return ExceptionChainRepr([(_text(passed), crash, None), *((part, crash, note) for part, note in parts)])

    def _skip(self, skipped: Mapping[int, pytest.TestReport]) -> object:
        """Return the location and reason of a skip, with the ranks if not all were skipped."""
        longrepr = next(iter(skipped.values())).longrepr
        size = len(self._world_result.by_rank)
        if len(skipped) == size or not isinstance(longrepr, tuple):
            return longrepr
        path, line, reason = longrepr
        return path, line, f"{reason} ({ranks_text(sorted(skipped))} of {size})"

    def _sections(self) -> list[tuple[str, str]]:
        """Return the output and log of the ranks until the end of this phase; equal text of several ranks once."""
        found: dict[tuple[str, str], list[int]] = {}
        for when in PHASES[: PHASES.index(self._when) + 1]:
            for index, stream in enumerate(("stdout", "stderr")):
                for rank, result in self.results.items():
                    text = result.printed.get(when, ("", ""))[index]
                    if text:
                        found.setdefault((f"Captured {stream} {when}", text), []).append(rank)
        for rank, report in self._reports.items():
            for title, text in report.sections:
                found.setdefault((title, text), []).append(rank)
        return [
            (f"{title} ({ranks_text(ranks)})", shortened(text, _LONGEST_OUTPUT))
            for (title, text), ranks in found.items()
        ]


def _unique(values: Iterable[Any]) -> list[Any]:
    """Return values without repetitions; they need not be hashable."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _keywords(item: pytest.Item) -> dict[str, Literal[1]]:
    return dict.fromkeys(item.keywords, 1)


def _phase_of_end(result: RankResult) -> str:
    """Return the phase in which a rank ended: the first without a report, but for a body that is not run."""
    setup = result.phases.get("setup")
    no_body = setup is not None and setup.report["outcome"] != "passed"
    return next((when for when in PHASES if when not in result.phases and not (no_body and when == "call")), PHASES[-1])


def _failure(phase: PhaseReport, report: pytest.TestReport) -> _Failure:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    first_line = text.partition("\n")[0]
    return _Failure(
        summary=_UNEXPECTED if first_line.startswith(_UNEXPECTED) else f"{_FAILED}{first_line}",
        location=text if crash is None else f"{crash.path}:{crash.lineno}",
        details=report.longrepr,
        is_consequence=phase.is_consequence,
        time_ns=phase.time_ns,
    )


def _by_location(failures: Mapping[int, _Failure]) -> list[dict[str, list[int]]]:
    """Return the summaries of failures with their ranks, those of one location together."""
    locations: dict[str, dict[str, list[int]]] = {}
    for rank, failure in failures.items():
        locations.setdefault(failure.location, {}).setdefault(failure.summary, []).append(rank)
    return [
        dict(sorted(((text, sorted(ranks)) for text, ranks in group.items()), key=lambda entry: entry[1]))
        for group in locations.values()
    ]


def _brief(summary: str, ranks: list[int], size: int) -> str:
    """Return a summary that begins with the error, since a line of pytest's summary has room for little more."""
    if summary.startswith(_FAILED):
        return f"{summary.removeprefix(_FAILED)} ({ranks_text(ranks)} of {size})"
    return f"{ranks_text(ranks)} {summary}"


def _text(text: str) -> ReprTraceback:
    return ReprTraceback([ReprEntryNative([f"{text}\n"])], None, "native")


def _tracebacks(details: object) -> list[tuple[ReprTraceback, str | None]]:
    if isinstance(details, ExceptionChainRepr):
        return [(traceback, note) for traceback, _, note in details.chain]
    return [(_text(str(details)), None)]
