"""`rankwise ps` and `rankwise top`: the jobs of this host, and their ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from rankwise.cli.exit_status import EXIT_ERROR, fail
from rankwise.errors import MissingDependencyError, RankwiseError

if TYPE_CHECKING:
    from rankwise._diagnose.jobs import Job

_CPU_SECONDS: Final = 0.2
_HEAD: Final = ("rank", "process", "state", "since", "CPU", "memory", "where")


@click.command(short_help="List the jobs of this host, and their ranks.")
def ps() -> None:
    """List your jobs on this host: their launcher, and for each rank its state, CPU, memory, and where it is.

    Jobs of all launchers that rankwise reads are found by the variables of their processes.
    """
    jobs = _jobs()
    before = _cpu_seconds(jobs)
    time.sleep(_CPU_SECONDS)
    for job in jobs:
        click.echo(_title(job))
        click.echo(_text(_rows(job, before, _CPU_SECONDS)))
    if not jobs:
        click.echo("no process of this user has the variables of a job")


@click.command(short_help="Show the jobs of this host until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="SECONDS",
    help="The time between two updates.",
)  # fmt: skip
@click.option("--updates", type=click.IntRange(1), metavar="N", help="End after so many updates.")
def top(*, interval: float, updates: int | None) -> None:
    """Show what `rankwise ps` shows, and refresh it until Ctrl-C. Needs rich."""
    try:
        from rich.live import Live  # noqa: PLC0415 - an optional package
    except ImportError:
        fail(
            MissingDependencyError("rankwise top needs rich, which is not installed: pip install 'rankwise[rich]'"),
            EXIT_ERROR,
        )
    number = 0
    jobs = _jobs()
    before, since = _cpu_seconds(jobs), time.monotonic()
    with Live(refresh_per_second=4) as live:
        while updates is None or number < updates:
            try:
                time.sleep(interval)
            except KeyboardInterrupt:
                return
            jobs = _jobs()
            live.update(_rich_tables(jobs, before, time.monotonic() - since), refresh=True)
            before, since = _cpu_seconds(jobs), time.monotonic()
            number += 1


def _jobs() -> list[Job]:
    from rankwise._diagnose.jobs import find_jobs  # noqa: PLC0415 - not needed for --help

    try:
        return find_jobs()
    except RankwiseError as error:
        fail(error, EXIT_ERROR)


def _cpu_seconds(jobs: Sequence[Job]) -> dict[int, float]:
    return {rank.process.pid: rank.process.cpu_seconds for job in jobs for rank in job.ranks}


def _title(job: Job) -> str:
    here = f"{len(job.ranks)} of {job.world_size} ranks here"
    return f"job {job.pid}: {job.launcher}, {here}, running for {_duration(max(r.process.age for r in job.ranks))}"


def _rows(job: Job, before: dict[int, float], seconds: float) -> list[tuple[str, ...]]:
    from rankwise._diagnose.sampling import STATES, sample_ranks  # noqa: PLC0415 - not needed for --help

    samples = {sample.rank: sample.process for sample in sample_ranks(job.ranks)}
    rows: list[tuple[str, ...]] = []
    for rank in job.ranks:
        sample, pid = samples[rank.rank], rank.process.pid
        used = max(0.0, sample.cpu_seconds - before.get(pid, sample.cpu_seconds))
        in_collective = sample.stack is not None and sample.stack.in_collective
        state = STATES.get(sample.state, "in a collective" if in_collective else "running").partition(" (")[0]
        where = sample.stack.location if sample.stack is not None else sample.channel or "-"
        memory = f"{rank.process.memory / (1 << 20):.0f} MiB"
        age = _duration(rank.process.age)
        rows.append((str(rank.rank), str(pid), state, age, f"{100 * used / seconds:.0f} %", memory, where))
    return rows


def _text(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_HEAD, *rows)
    )


def _rich_tables(jobs: Sequence[Job], before: dict[int, float], seconds: float) -> Any:  # noqa: ANN401 - rich may be missing
    from rich.console import Group  # noqa: PLC0415 - an optional package
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    tables = []
    for job in jobs:
        table = Table(*_HEAD, title=_title(job), title_justify="left")
        for row in _rows(job, before, seconds):
            table.add_row(*map(Text, row))
        tables.append(table)
    return Group(*tables) if tables else Text("no process of this user has the variables of a job")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
