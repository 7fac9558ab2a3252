"""One report for all ranks: who passed, what went wrong first, and what several ranks tell told once."""

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
from rankwise.testing._plugin.runner import RankResult, WorldResult

# In pytest's summary; below the test are all.
_STORIES_NAMED: Final = 3
# Of what a rank printed.
_LONGEST_OUTPUT: Final = 100_000
_UNEXPECTED: Final = "[XPASS(strict)]"
_FAILED: Final = "failed: "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """How a phase failed on one rank.

    Attributes:
        what: In one line.
        where: Where it was raised; stories of one place are told together.
        details: As pytest shows it, or as text.
        order: Causes before consequences, and then by time.
    """

    what: str
    where: str
    details: Any
    order: tuple[bool, int]


def merged_reports(item: pytest.Item, outcome: WorldResult) -> list[pytest.TestReport]:
    """Return one report for each phase that any rank began."""
    phases = [_MergedPhase(item, outcome, when) for when in PHASES]
    reports = [*_subtests(item, outcome), *(phase.report() for phase in phases if phase.attempts)]
    if outcome.afterwards:
        reports.append(error_report(item, "\n".join(outcome.afterwards), "teardown"))
    return reports


def error_report(item: pytest.Item, text: str, when: Literal["setup", "teardown"] = "setup") -> pytest.TestReport:
    """Return the report of what went wrong before a test, or after it."""
    return pytest.TestReport(item.nodeid, item.location, _keywords(item), "failed", text, when)


def _subtests(item: pytest.Item, outcome: WorldResult) -> list[pytest.TestReport]:
    """Return the reports of subtests, of which the same on several ranks is told once."""
    read: Callable[..., Any] = item.config.hook.pytest_report_from_serializable
    told: dict[tuple[str, str, str], pytest.TestReport] = {}
    for rank, attempt in outcome.attempts.items():
        for aside in attempt.asides:
            report = read(config=item.config, data=aside.report)
            if report is not None:
                report.sections.append(("World", f"on rank {rank} of {len(outcome.attempts)}"))
                told.setdefault((repr(getattr(report, "context", "")), report.outcome, report.longreprtext), report)
    return list(told.values())


class _MergedPhase:
    """One phase of a test on all ranks that began it."""

    def __init__(self, item: pytest.Item, outcome: WorldResult, when: str) -> None:
        self.attempts = {
            rank: attempt
            for rank, attempt in outcome.attempts.items()
            if when in attempt.phases or ((attempt.ended or rank in outcome.late) and _stopped_in(attempt) == when)
        }
        self._item = item
        self._outcome = outcome
        self._when = when
        read: Callable[..., Any] = item.config.hook.pytest_report_from_serializable
        self._reports: dict[int, pytest.TestReport] = {
            rank: read(config=item.config, data=attempt.phases[when].report)
            for rank, attempt in self.attempts.items()
            if when in attempt.phases
        }

    def report(self) -> pytest.TestReport:
        """Return what to show of it."""
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
            user_properties=_each_once(pair for report in reports for pair in report.user_properties),
        )
        for name, value in vars(reports[0]).items() if reports else ():
            if name != "wasxfail" and not hasattr(report, name):  # what a plugin has put there
                setattr(report, name, value)
        if xfail is not None:
            report.wasxfail = xfail
        return report

    def _verdict(self) -> tuple[str, Any, str | None]:
        """Return the outcome, what to show of it, and why it was expected to fail, if it was."""
        stories = self._stories()
        late = {
            rank: attempt.stack
            for rank, attempt in self.attempts.items()
            if rank in self._outcome.late and _stopped_in(attempt) == self._when
        }
        skipped = {rank: report for rank, report in self._reports.items() if report.skipped}
        expected = [report for report in skipped.values() if hasattr(report, "wasxfail")]
        if expected:  # what that does to the other ranks was expected too
            stories = {
                rank: story
                for rank, story in stories.items()
                if not story.order[0] and rank in self._reports and story.what != _UNEXPECTED
            }
            late = {}
        if skipped and not late and all(story.order[0] for story in stories.values()):
            stories = {}  # they waited for one that skipped
        if stories or late:
            return "failed", self._told(stories, late), None
        if expected:
            return "skipped", expected[0].longrepr, expected[0].wasxfail
        if skipped:
            return "skipped", self._skip(skipped), None
        unexpected = {getattr(report, "wasxfail", None) for report in self._reports.values()}
        return "passed", None, unexpected.pop() if len(unexpected) == 1 else None

    def _stories(self) -> dict[int, _Failure]:
        """Return what each rank has to tell that failed, the first in time first."""
        stories = {}
        for rank, attempt in self.attempts.items():
            phase, report = attempt.phases.get(self._when), self._reports.get(rank)
            if phase is not None and report is not None and report.failed:
                stories[rank] = _story(phase, report)
            elif attempt.ended and _stopped_in(attempt) == self._when:
                what, _, rest = attempt.ended.partition("\n")
                details = f"{rest}\n{tracebacks.trimmed(attempt.stack)}".strip()
                stories[rank] = _Failure(
                    what=what, where=f"{what}\n{details}", details=details, order=(False, attempt.ended_ns)
                )
        return dict(sorted(stories.items(), key=lambda entry: entry[1].order))

    def _told(self, stories: Mapping[int, _Failure], late: Mapping[int, str]) -> ExceptionChainRepr:
        """Return the failures as pytest shows one, with a headline; what one place raised is shown once."""
        file = str(self._item.path)
        size = len(self._outcome.attempts)
        passed = f"{size - len(stories) - len(late)} of {size} ranks passed"
        headline: list[str] = []
        parts: list[tuple[ReprTraceback, str | None]] = []
        for group in _grouped(stories):
            story = stories[next(iter(group.values()))[0]]
            told = [f"{ranks_text(ranks)} {'then ' * story.order[0]}{what}" for what, ranks in group.items()]
            if not headline and not story.order[0]:
                what, ranks = next(iter(group.items()))
                headline.append(_brief(what, ranks, size))
                headline += told[1:]
            else:
                headline += told
            parts.append((_text("\n".join(told)), None))
            if story.details and not (story.order[0] and len(headline) > len(told)):  # its cause was told before
                parts += _shown(story.details)
        if late:
            headline.append(f"{self._outcome.reason}: {tracebacks.summary(late, file)}")
            parts.append((_text(headline[-1]), None))
            parts += [(_text(f"{title}\n{stack}"), None) for title, stack in tracebacks.grouped(late, file)]
        shown = [*headline[:_STORIES_NAMED], *["..."] * (len(headline) > _STORIES_NAMED), passed]
        crash = ReprFileLocation(file, (self._item.location[1] or 0) + 1, "; ".join(shown))
        return ExceptionChainRepr([(_text(passed), crash, None), *((part, crash, note) for part, note in parts)])

    def _skip(self, skipped: Mapping[int, pytest.TestReport]) -> object:
        """Return where and why it was skipped, naming the ranks if that were not all."""
        longrepr = next(iter(skipped.values())).longrepr
        if len(skipped) == len(self._outcome.attempts) or not isinstance(longrepr, tuple):
            return longrepr
        path, line, reason = longrepr
        return path, line, f"{reason} ({ranks_text(sorted(skipped))} of {len(self._outcome.attempts)})"

    def _sections(self) -> list[tuple[str, str]]:
        """Return what ranks have printed and logged until now, the same by several once."""
        found: dict[tuple[str, str], list[int]] = {}
        for when in PHASES[: PHASES.index(self._when) + 1]:
            for index, stream in enumerate(("stdout", "stderr")):
                for rank, attempt in self.attempts.items():
                    text = attempt.printed.get(when, ("", ""))[index]
                    if text:
                        found.setdefault((f"Captured {stream} {when}", text), []).append(rank)
        for rank, report in self._reports.items():
            for title, text in report.sections:
                found.setdefault((title, text), []).append(rank)
        return [
            (f"{title} ({ranks_text(ranks)})", shortened(text, _LONGEST_OUTPUT))
            for (title, text), ranks in found.items()
        ]


def _each_once(values: Iterable[Any]) -> list[Any]:
    """Return values, which need not be hashable, each once."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _keywords(item: pytest.Item) -> dict[str, Literal[1]]:
    return dict.fromkeys(item.keywords, 1)


def _stopped_in(attempt: RankResult) -> str:
    """Return the phase in which a rank ended."""
    setup = attempt.phases.get("setup")
    no_body = setup is not None and setup.report["outcome"] != "passed"
    return next(
        (when for when in PHASES if when not in attempt.phases and not (no_body and when == "call")), PHASES[-1]
    )


def _story(phase: PhaseReport, report: pytest.TestReport) -> _Failure:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    where = text if crash is None else f"{crash.path}:{crash.lineno}"
    what = text.partition("\n")[0]
    return _Failure(
        what=_UNEXPECTED if what.startswith(_UNEXPECTED) else f"{_FAILED}{what}",
        where=where,
        details=report.longrepr,
        order=(phase.consequence, phase.time_ns),
    )


def _grouped(stories: Mapping[int, _Failure]) -> list[dict[str, list[int]]]:
    """Return stories of one place together: what happened, and to which ranks."""
    places: dict[str, dict[str, list[int]]] = {}
    for rank, story in stories.items():
        places.setdefault(story.where, {}).setdefault(story.what, []).append(rank)
    return [
        dict(sorted(((what, sorted(ranks)) for what, ranks in place.items()), key=lambda entry: entry[1]))
        for place in places.values()
    ]


def _brief(what: str, ranks: list[int], size: int) -> str:
    """Return what happened, beginning with the error: a line of pytest's summary has room for little more."""
    if what.startswith(_FAILED):
        return f"{what.removeprefix(_FAILED)} ({ranks_text(ranks)} of {size})"
    return f"{ranks_text(ranks)} {what}"


def _text(text: str) -> ReprTraceback:
    return ReprTraceback([ReprEntryNative([f"{text}\n"])], None, "native")


def _shown(details: object) -> list[tuple[ReprTraceback, str | None]]:
    if isinstance(details, ExceptionChainRepr):
        return [(traceback, note) for traceback, _, note in details.chain]
    return [(_text(str(details)), None)]
