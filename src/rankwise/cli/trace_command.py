"""`rankwise trace`: who came late to collectives in a run, from the traces of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from rankwise.cli.printing import echo
from rankwise.errors import RankwiseError

_TIMELINE: Final = "timeline.json"
_PAGE: Final = "lateness.html"


@click.command(
    short_help="Show which ranks came late to collectives.", epilog="Example: rankwise trace traces --output ."
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Where to write the files, instead of beside the traces.",
)  # fmt: skip
def trace(*, folder: Path, output: Path | None) -> None:
    """Show which ranks came late to collectives, how often, and what that has cost.

    FOLDER is that of RANKWISE_TRACE or init(trace=), of which the newest run is shown, or the folder of a run. The
    job may still run, or have ended in any way.

    Beside the traces, or in --output, it writes timeline.json, the calls of all ranks for https://ui.perfetto.dev, and
    lateness.html, the table and a picture of the lateness by rank and call.
    """
    from rankwise._trace.reading import read_run  # noqa: PLC0415 - not needed for --help
    from rankwise._trace.report import page, summary, table, write_timeline  # noqa: PLC0415

    run = read_run(folder)
    rows = table(run)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    echo("\n".join(summary(run)))
    for row in rows if len(rows) > 1 else ():
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    into = run.folder if output is None else output
    try:
        into.mkdir(parents=True, exist_ok=True)
        with (into / _TIMELINE).open("w", encoding="utf-8") as file:
            write_timeline(run, file)
        (into / _PAGE).write_text(page(run), encoding="utf-8")
    except OSError as error:
        raise RankwiseError(f"the files cannot be written to {into}: {error}; name another folder: --output") from error
    echo(f"files: {into / _TIMELINE}, {into / _PAGE}")
