"""`rankwise stacks`: where each rank of a running job is."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

import click

from rankwise.cli.printing import echo

if TYPE_CHECKING:
    from rankwise._diagnose.jobs import Job
    from rankwise._diagnose.sampling import RankSample

_INTERVAL: Final = 0.5


@click.command(
    short_help="Show where each rank of a running job is.", epilog="Example: rankwise stacks --watch 5 12345"
)
@click.argument("job", type=click.IntRange(1), metavar="[PID]", required=False)
@click.option("--native", is_flag=True, help="Show functions of C++ too; each rank is stopped for some milliseconds.")
@click.option(
    "--watch", type=click.IntRange(2), metavar="N",
    help="Take N samples, and print which rank the others wait for, and whether it is stuck or slow.",
)  # fmt: skip
@click.option(
    "--interval", type=click.FloatRange(0, min_open=True), default=_INTERVAL, show_default=True, metavar="SECONDS",
    help="The time between two samples.",
)  # fmt: skip
def stacks(*, job: int | None, native: bool, watch: int | None, interval: float) -> None:
    """Show the Python stacks of the ranks of a job on this host, equal ones together.

    PID is a process of the job: a rank, its launcher, or a worker of a data loader, as `rankwise ps` shows them. It may
    be left out if there is one job. The job need not use rankwise: then py-spy reads it (pip install
    py-spy).

    The exit status is 1 if no stack could be read.
    """
    from rankwise._diagnose.folding import details, summary  # noqa: PLC0415 - not needed for --help
    from rankwise._diagnose.jobs import find_job  # noqa: PLC0415

    found = find_job(job)
    samples = _watch(found, watch, interval, native=native) if watch else _sample(found, native=native)
    echo(summary(samples) if not watch else f"last sample: {summary(samples)}")
    echo(f"\n{details(samples)}")
    if all(sample.process.stack is None for sample in samples):
        sys.exit(1)


def _sample(job: Job, *, native: bool) -> list[RankSample]:
    from rankwise._diagnose.sampling import sample_ranks  # noqa: PLC0415 - not needed for --help

    return sample_ranks(job.ranks, native=native)


def _watch(job: Job, number: int, interval: float, *, native: bool) -> list[RankSample]:
    """Take samples, print the verdict, and return the last one."""
    from rankwise._diagnose.watching import verdict  # noqa: PLC0415 - not needed for --help

    history = [_sample(job, native=native)]
    start = time.monotonic()
    for _ in range(number - 1):
        if all(sample.process.state == "X" for sample in history[-1]):
            break  # nothing is left to look at
        time.sleep(interval)
        history.append(_sample(job, native=native))
    echo(verdict(job, history, time.monotonic() - start))
    return history[-1]
