"""`rankwise env`: the rank of a process, or of all ranks, with the source of each value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from rankwise._environment.detect import LAUNCHERS
from rankwise.cli.printing import echo, output_errors
from rankwise.errors import InvalidArgumentError, JoinError

if TYPE_CHECKING:
    from rankwise._environment.facts import LaunchEnvironment
    from rankwise.cli.env_tables import Table

_NAMES: Final = ", ".join(launcher.name for launcher in LAUNCHERS)
# How long ranks wait for each other with --all, and the longest time that can be chosen.
_TIMEOUT: Final = 30.0
_LONGEST: Final = 86_400.0


@click.command(
    short_help="Show the rank of this process, and where it comes from.",
    epilog="Example: srun -n 4 rankwise env --all",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON. With --all, rank zero prints that of all ranks: some launchers mix the output of ranks.",
)
@click.option("--explain", is_flag=True, help="Show why each launcher was chosen, or was not.")
@click.option(
    "--launchers", "lists_launchers", is_flag=True, help="Show every launcher, and the variables that it reads."
)
@click.option(
    "--all", "all_ranks", is_flag=True, help="Wait for all ranks; rank zero shows in which values they differ."
)
@click.option(
    "--timeout", type=click.FloatRange(0, _LONGEST, min_open=True), default=_TIMEOUT, show_default=True,
    metavar="SECONDS", help="How long ranks wait for each other with --all.",
)  # fmt: skip
@click.option(
    "--launcher", default="auto", show_default=True, metavar="NAME",
    help=f"Read the variables of this launcher: auto, {_NAMES}.",
)  # fmt: skip
@click.option(
    "--rich/--plain", "with_rich", default=None, help="With rich, by default on a terminal; or as plain text."
)
def env(
    *,
    as_json: bool,
    explain: bool,
    lists_launchers: bool,
    all_ranks: bool,
    timeout: float,
    launcher: str,
    with_rich: bool | None,
) -> None:
    """Show the rank of this process, and the variable that each value comes from.

    Run it in place of a script to see the variables of a launcher: mpirun -n 2 rankwise env

    The exit status is 1 if the variables are an error: the one that rankwise.init() would raise.
    """
    if explain + lists_launchers + all_ranks > 1:
        raise InvalidArgumentError("--explain, --launchers and --all exclude each other")
    if lists_launchers:
        _show_launchers(as_json=as_json, with_rich=with_rich)
    elif explain:
        _show_reasons(launcher, as_json=as_json, with_rich=with_rich)
    elif all_ranks:
        _show_all_ranks(launcher, timeout=timeout, as_json=as_json, with_rich=with_rich)
    else:
        _show_process(read_variables(launcher), launcher, as_json=as_json, with_rich=with_rich)


def read_variables(launcher: str) -> LaunchEnvironment:
    """Return the launch environment of this process; its warnings are shown with it.

    Raises:
        LauncherEnvironmentError: The variables are an error in `init()`, too.
    """
    from rankwise._environment.detect import detect  # noqa: PLC0415 - not needed for --help
    from rankwise._session.environ import process_variables, read_check, read_shared_memory  # noqa: PLC0415

    reading = detect(process_variables(), launcher)
    read_check()
    read_shared_memory()
    return reading


def _show_launchers(*, as_json: bool, with_rich: bool | None) -> None:
    from rankwise._environment.detect import launchers  # noqa: PLC0415 - likewise
    from rankwise.cli.env_tables import is_verified, launchers_table, variables_of  # noqa: PLC0415

    known = launchers()
    document = [
        {
            "name": one.name,
            "description": one.description,
            "verified": is_verified(one),
            "variables": variables_of(one),
        }
        for one in known
    ]
    _print(document if as_json else None, launchers_table(known), with_rich=with_rich)


def _show_reasons(launcher: str, *, as_json: bool, with_rich: bool | None) -> None:
    """Show the reasons first: they are also there if the variables of the chosen launcher are an error."""
    from dataclasses import asdict  # noqa: PLC0415 - likewise

    from rankwise._environment.candidates import candidates  # noqa: PLC0415
    from rankwise._session.environ import process_variables  # noqa: PLC0415
    from rankwise.cli.env_tables import candidates_table  # noqa: PLC0415

    found = candidates(process_variables(), launcher)
    _print([asdict(one) for one in found] if as_json else None, candidates_table(found), with_rich=with_rich)
    read_variables(launcher)


def _show_process(reading: LaunchEnvironment, launcher: str, *, as_json: bool, with_rich: bool | None) -> None:
    from rankwise._session.environ import process_variables  # noqa: PLC0415 - likewise
    from rankwise.cli.env_report import report_on  # noqa: PLC0415
    from rankwise.cli.env_tables import report_table  # noqa: PLC0415

    report = report_on(reading, process_variables(), launcher)
    _print(report.document() if as_json else None, report_table(report), with_rich=with_rich)


def _show_all_ranks(launcher: str, *, timeout: float, as_json: bool, with_rich: bool | None) -> None:
    from rankwise._rendezvous.membership import JoinReply  # noqa: PLC0415 - likewise
    from rankwise._session.environ import process_variables  # noqa: PLC0415
    from rankwise.cli.env_ranks import gather_reports, meeting_point  # noqa: PLC0415
    from rankwise.cli.env_report import report_on  # noqa: PLC0415

    reading = read_variables(launcher)
    endpoint = meeting_point(reading, timeout=timeout)

    def report(reply: JoinReply) -> str:
        return json.dumps(report_on(reply.complete(reading), process_variables(), launcher).document())

    if endpoint is None or reading.world_size.value == 1:
        if as_json:
            _show_ranks([report(JoinReply())], as_json=True, with_rich=with_rich)
        else:
            _show_process(reading, launcher, as_json=False, with_rich=with_rich)
        return
    lines = gather_reports(endpoint, reading, report, command="env", timeout=timeout)
    if lines is not None:
        _show_ranks(lines, as_json=as_json, with_rich=with_rich)


def _show_ranks(lines: Sequence[str], *, as_json: bool, with_rich: bool | None) -> None:
    from rankwise.cli.env_tables import differing, ranks_table, rows_of  # noqa: PLC0415 - likewise

    try:
        documents: list[dict[str, Any]] = [json.loads(line) for line in lines]
        table = ranks_table(documents)
        differs = list(differing([rows_of(document) for document in documents]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JoinError(
            f"the report of a rank is malformed ({type(error).__name__}: {error}); do all ranks run the same version "
            "of rankwise?"
        ) from error
    _print({"ranks": documents, "differs": differs} if as_json else None, table, with_rich=with_rich)


def _print(document: object, table: Table, *, with_rich: bool | None) -> None:
    """Print an object as JSON; without one, a table.

    Raises:
        RankwiseError: stdout cannot be written to: its disk is full, for example.
    """
    from rankwise.cli.env_tables import show  # noqa: PLC0415 - likewise

    if document is not None:
        echo(json.dumps(document, indent=2))
        return
    with output_errors():
        show(table, with_rich=with_rich)
