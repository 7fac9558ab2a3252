"""The results of a run of pytest, as it writes them in JUnit's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one test.

    Attributes:
        name: Its module, class and name.
        outcome: "passed", "failure", "error" or "skipped".
        message: The message of its failure, error or skip; "" without one.
    """

    name: str
    outcome: str
    message: str


def tests_of(results: Path) -> list[Result]:
    """Return the results in a file."""
    found = []
    for case in ET.parse(results).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        ends = [part for part in case if part.tag in {"failure", "error"}] or case.findall("skipped")
        outcome, message = (ends[0].tag, ends[0].get("message") or "") if ends else ("passed", "")
        found.append(Result(f"{case.get('classname')}::{case.get('name')}", outcome, message))
    return found
