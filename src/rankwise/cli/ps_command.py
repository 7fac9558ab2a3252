"""`rankwise ps` and `rankwise top`: the jobs of this host, and their ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from rankwise.cli.printing import echo, output_errors
from rankwise.errors import MissingDependencyError

if TYPE_CHECKING:
    from rankwise._diagnose.jobs import Job
    from rankwise._diagnose.sampling import ProcessSample

_CPU_SECONDS: Final = 0.2
_HEAD: Final = ("rank", "process", "state", "since", "CPU", "memory", "late", "where")


@click.command(short_help="List the jobs of this host, and their ranks.", epilog="Example: rankwise ps --json")
@click.argument("pid", type=click.IntRange(1), metavar="[PID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: times in seconds, CPU in cores, memory in bytes.")
def ps(pid: int | None, *, as_json: bool) -> None:
    """List your jobs on this host: their launcher, and for each rank its state, CPU, memory, and where it is.

    Jobs of all launchers that rankwise reads are found by the variables of their processes. With PID, a rank, its
    launcher or a worker of a data loader, only its job is listed.
    """
    from rankwise._diagnose.jobs import find_job, find_jobs  # noqa: PLC0415 - not needed for --help

    jobs = find_jobs() if pid is None else [find_job(pid)]
    before = _cpu_seconds(jobs)
    time.sleep(_CPU_SECONDS)
    found = [(job, _ranks(job, before, _CPU_SECONDS)) for job in jobs]
    if as_json:
        echo(json.dumps([_job_values(job, ranks) for job, ranks in found], indent=2))
        return
    for job, ranks in found:
        echo(_title(job))
        echo(_text([rank.row() for rank in ranks]))
    if not jobs:
        echo("no process of this user has the variables of a job")


@click.command(short_help="Show the jobs of this host until Ctrl-C.", epilog="Example: rankwise top --interval 5")
@click.option(
    "--interval", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="SECONDS",
    help="The time between two updates.",
)  # fmt: skip
@click.option("--updates", type=click.IntRange(1), metavar="N", help="End after so many updates.")
def top(*, interval: float, updates: int | None) -> None:
    """Show the tables of `rankwise ps`, and refresh them until Ctrl-C. Needs rich.

    Where the output is no terminal, or a dumb one, each update is printed below the last one.
    """
    try:
        from rich.console import Console  # noqa: PLC0415 - an optional package
        from rich.live import Live  # noqa: PLC0415
    except ImportError:
        raise MissingDependencyError("rankwise top needs rich, which is not installed: pip install rich") from None
    console = Console()
    live = Live(console=console, auto_refresh=False)
    in_place = console.is_terminal and not console.is_dumb_terminal  # in which `Live` shows nothing before its end
    with contextlib.suppress(KeyboardInterrupt), live if in_place else contextlib.nullcontext():
        for tables in _updates(interval, updates):
            with output_errors():
                if in_place:
                    live.update(tables, refresh=True)
                else:
                    console.print(tables)


def _updates(interval: float, updates: int | None) -> Iterator[Any]:
    from rankwise._diagnose.jobs import find_jobs  # noqa: PLC0415 - not needed for --help

    jobs = find_jobs()
    for _ in itertools.count() if updates is None else range(updates):
        before, since = _cpu_seconds(jobs), time.monotonic()
        time.sleep(interval)
        jobs = find_jobs()
        yield _rich_tables(jobs, before, time.monotonic() - since)


def _cpu_seconds(jobs: Sequence[Job]) -> dict[int, float]:
    return {rank.process.pid: rank.process.cpu_seconds for job in jobs for rank in job.ranks}


def _title(job: Job) -> str:
    here = f"{len(job.ranks)} of {job.world_size} ranks here"
    return f"job {job.pid}: {job.launcher}, {here}, running for {_duration(max(r.process.age for r in job.ranks))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A rank: its number, process and state, the seconds for which it has run, its cores, bytes, and where it is.

    `late` is how many seconds after the others it came to its last collectives, on average; None if that is not known.
    """

    rank: int
    pid: int
    state: str
    seconds: float
    cores: float
    memory: int
    late: float | None
    where: str

    def row(self) -> tuple[str, ...]:
        from rankwise._trace.lateness import milliseconds  # noqa: PLC0415 - not needed for --help

        memory = f"{self.memory / (1 << 20):.0f} MiB"
        age = _duration(self.seconds)
        late = "-" if self.late is None else milliseconds(self.late)
        return str(self.rank), str(self.pid), self.state, age, f"{100 * self.cores:.0f} %", memory, late, self.where


def _job_values(job: Job, ranks: Sequence[_Rank]) -> dict[str, object]:
    values = {"pid": job.pid, "launcher": job.launcher, "world_size": job.world_size}
    return {**values, "ranks": [asdict(rank) for rank in ranks]}


def _ranks(job: Job, before: dict[int, float], seconds: float) -> list[_Rank]:
    from rankwise._comm.control.page.layout import place_of_arrivals  # noqa: PLC0415 - not needed for --help
    from rankwise._diagnose.sampling import sample_ranks  # noqa: PLC0415
    from rankwise._diagnose.sleep_times import sleep_seconds  # noqa: PLC0415
    from rankwise._trace.page_arrivals import mean_lateness  # noqa: PLC0415

    asleep = sleep_seconds(rank.process.pid for rank in job.ranks)  # before samples, which may wake them
    late = mean_lateness(job.pid, job.world_size, place_of_arrivals(job.world_size))
    samples = {sample.rank: sample.process for sample in sample_ranks(job.ranks)}
    ranks = []
    for rank in job.ranks:
        sample, pid = samples[rank.rank], rank.process.pid
        used = max(0.0, sample.cpu_seconds - before.get(pid, sample.cpu_seconds))
        ranks.append(
            _Rank(
                rank=rank.rank,
                pid=pid,
                state=_state(sample, asleep.get(pid, 0.0)),
                seconds=rank.process.age,
                cores=used / seconds,
                memory=rank.process.memory,
                late=late.get(rank.rank),
                where=sample.stack.location if sample.stack is not None else sample.channel or "-",
            )
        )
    return ranks


def _state(sample: ProcessSample, asleep: float) -> str:
    """Return the state of a rank; in a collective, with the time for which it has waited, if that is known."""
    from rankwise._diagnose.sampling import STATES  # noqa: PLC0415 - not needed for --help
    from rankwise._diagnose.watching import waits  # noqa: PLC0415
    from rankwise._rank_files import read_wait  # noqa: PLC0415

    if sample.state in STATES:
        return STATES[sample.state].partition(" (")[0]
    wait = read_wait(sample.pid)
    if wait is None and not waits(sample):
        return "running"
    seconds = asleep if wait is None else wait.seconds
    return f"in a collective for {seconds:.0f} s" if seconds >= 1 else "in a collective"


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
        for rank in _ranks(job, before, seconds):
            table.add_row(*map(Text, rank.row()))
        tables.append(table)
    return Group(*tables) if tables else Text("no process of this user has the variables of a job")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
