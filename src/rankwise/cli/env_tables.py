"""Tables of `rankwise env`: as plain text, or by rich on a terminal."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from rankwise._environment.candidates import Candidate, recognized_by
from rankwise._environment.facts import TOPOLOGY_FIELDS
from rankwise._text import ranks_text
from rankwise.cli.env_report import Report, Row
from rankwise.errors import MissingDependencyError, printable
from rankwise.extend.launchers import Launcher

# The most characters of a value, or of its source, that are shown.
_WIDEST: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        columns: The names of the columns; empty for a table without a header.
        sections: Groups of rows, each of as many cells as there are columns.
        notes: Lines below the table.
    """

    columns: tuple[str, ...] = ()
    sections: Sequence[Sequence[tuple[str, ...]]]
    notes: tuple[str, ...] = ()


def report_table(report: Report) -> Table:
    """Return the table of one process."""
    sections = [
        [(name, _short(row.value), _short(row.source)) for name, row in section.items()]
        for section in report.sections.values()
        if section
    ]
    return Table(sections=sections, notes=tuple(f"warning: {warning}" for warning in report.warnings))


def candidates_table(found: Sequence[Candidate]) -> Table:
    """Return the table of launchers that were looked for, in this order."""
    rows = [(one.name, "chosen" if one.chosen else "no", one.reason) for one in found]
    return Table(columns=("launcher", "", "reason"), sections=[rows])


def launchers_table(known: Sequence[Launcher]) -> Table:
    """Return the table of all launchers, in the order in which their variables are looked for."""
    rows = [
        (one.name, one.description, "unverified" if is_verified(one) is False else "", " ".join(variables_of(one)))
        for one in known
    ]
    return Table(columns=("launcher", "programs", "", "variables"), sections=[rows])


def variables_of(launcher: Launcher) -> tuple[str, ...]:
    """Return the variables that a launcher reads; those by which it is recognized if it does not list them."""
    return tuple(getattr(launcher, "variables", ())) or recognized_by(launcher.present)


def is_verified(launcher: Launcher) -> bool | None:
    """Return whether a launcher's variables were seen in its processes, and are not from its documentation alone."""
    verified: bool | None = getattr(launcher, "verified", None)
    return verified


def rows_of(document: dict[str, Any]) -> dict[str, Row]:
    """Return the rows of a report, by name, from its object for JSON.

    Raises:
        KeyError, TypeError, AttributeError: It is not the object of a report.
    """
    facts = {name: document["facts"][name] for name in TOPOLOGY_FIELDS}
    sections = [facts, *(document[name] for name in ("rendezvous", "devices", "software", "host", "variables"))]
    rows = {"launcher": Row(document["launcher"], document["reason"])}
    return rows | {
        name: Row(None, "") if fact is None else Row(fact["value"], fact["source"])
        for section in sections
        for name, fact in section.items()
    }


def differing(reports: Sequence[dict[str, Row]]) -> dict[str, list[str]]:
    """Return the cells of the columns in which the ranks differ, by column: values, or else their sources."""
    names = dict.fromkeys(name for rows in reports for name in rows)
    columns: dict[str, list[str]] = {}
    for name in names:
        rows = [report.get(name, Row(None, "")) for report in reports]
        values = [_short(row.value) for row in rows]
        sources = [_short(row.source or None) for row in rows]
        if len(set(values)) > 1:
            columns[name] = values
        elif len(set(sources)) > 1:
            columns[f"{name} from"] = sources
    return columns


def ranks_table(documents: Sequence[dict[str, Any]]) -> Table:
    """Return the table of all ranks, with the columns in which they differ."""
    reports = [rows_of(document) for document in documents]
    columns = {"rank": [str(rank) for rank in range(len(reports))]} | differing(reports)
    ranks_by_warning: dict[str, list[int]] = {}
    for rank, document in enumerate(documents):
        for warning in document["warnings"]:
            ranks_by_warning.setdefault(warning, []).append(rank)
    return Table(
        columns=tuple(columns),
        sections=[list(zip(*columns.values(), strict=True))],
        notes=(
            f"all else is the same on the {len(reports)} ranks",
            *(f"warning of {ranks_text(ranks)}: {warning}" for warning, ranks in ranks_by_warning.items()),
        ),
    )


def show(table: Table, *, with_rich: bool | None) -> None:
    """Print a table, with rich if `with_rich`, or by default if rich is installed and stdout is a terminal.

    Raises:
        MissingDependencyError: rich was asked for, and is not installed.
    """
    is_installed = importlib.util.find_spec("rich") is not None
    if with_rich and not is_installed:
        raise MissingDependencyError(
            f"--rich needs the package 'rich', which {sys.executable} does not have: install it, as with "
            "'python -m pip install rich', or leave out --rich",
            name="rich",
        )
    if with_rich or (with_rich is None and is_installed and is_terminal()):
        _show_with_rich(table, is_terminal=True if with_rich else None)
        return
    for line in _plain_lines(table):
        click.echo(line)


def is_terminal() -> bool:
    """Return whether stdout is a terminal that somebody reads: Open MPI gives its ranks one that has no width."""
    if sys.stdout is None:  # it was closed before the start
        return False
    try:
        return sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except OSError:
        return False


def _plain_lines(table: Table) -> Iterator[str]:
    sections = [[tuple(_one_line(cell) for cell in row) for row in section] for section in table.sections]
    header = [table.columns] if table.columns else []
    widths = [
        max(map(len, column)) for column in zip(*header, *(row for rows in sections for row in rows), strict=True)
    ]
    for number, rows in enumerate(sections):
        if number:
            yield ""
        for row in (*header, *rows):
            yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    if table.notes:
        yield ""
        yield from map(printable, table.notes)


def _short(value: int | str | None) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _one_line(cell: str) -> str:
    return " ".join(printable(cell).split())


def _show_with_rich(table: Table, *, is_terminal: bool | None) -> None:
    from rich import box  # noqa: PLC0415 - optional, and slow to import
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415 - cells are no markup

    shown = RichTable(box=box.ROUNDED, show_header=bool(table.columns), header_style="bold")
    for number in range(len(table.sections[0][0])):
        shown.add_column(table.columns[number] if table.columns else "", style="bold" if number == 0 else None)
    for rows in table.sections:
        for row in rows:
            shown.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
        shown.add_section()
    console = Console(force_terminal=is_terminal)
    console.print(shown)
    for note in table.notes:
        console.print(Text(printable(note), style="yellow" if note.startswith("warning") else "dim"))
