"""`rankwise bench`: how long collectives take, and which host or rank is slow."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rankwise._dependencies import require_torch
from rankwise.cli.printing import echo
from rankwise.errors import InvalidArgumentError, RankFailedError, printable

if TYPE_CHECKING:
    from rankwise._bench.results import Row
    from rankwise._session.session import Session

_IS_SLOW, _MISUSED = 1, 2
_LONGEST: Final = 3600.0
# How long other ranks leave it to rank zero to say what is wrong: launchers end all ranks when the first has failed.
_RANK_ZERO_SECONDS: Final = 2.0
# From one size to the next.
_FACTOR: Final = 4
_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30}
_DTYPES: Final = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
Say = Callable[[str], None]


def _bytes(_: click.Context, __: click.Parameter, value: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,14})([KMG]?)", value.upper())
    if found is None:
        raise click.BadParameter(f"{value!r} is no number of bytes, such as 8, 64K, 64M or 1G")
    return int(found[1]) << _UNITS[found[2]]


@click.command(
    short_help="Measure collectives, and name slow hosts.",
    epilog="Example: srun -N2 --ntasks-per-node=8 rankwise bench all_reduce --csv today.csv --against yesterday.csv",
)
@click.argument("collectives", nargs=-1, metavar="[COLLECTIVE]...")
@click.option("-n", "--nproc", type=click.IntRange(1), metavar="NUMBER", help="Start so many ranks here.")
@click.option("--minbytes", "smallest", default="4", show_default=True, metavar="BYTES", callback=_bytes, help="Least.")
@click.option("--maxbytes", "largest", default="64M", show_default=True, metavar="BYTES", callback=_bytes, help="Most.")
@click.option("--dtype", type=click.Choice(_DTYPES), default=_DTYPES[0], show_default=True, help="Of the elements.")
@click.option(
    "--seconds", type=click.FloatRange(0, _LONGEST), default=0.5, show_default=True, metavar="SECONDS",
    help="For each size; there are five blocks of calls at least.",
)  # fmt: skip
@click.option("--csv", "file", default="", metavar="FILE", help="Write the rows, each with its environment.")
@click.option("--plot", default="", metavar="FILE", help="Draw the bandwidths, with matplotlib.")
@click.option("--against", default="", metavar="FILE", help="Compare with the rows of an old --csv file.")
@click.option("--pairs", is_flag=True, help="Name slow hosts, or slow ranks of one host, instead.")
@click.option(
    "--tolerance", type=click.FloatRange(0), default=0.5, show_default=True, metavar="SHARE",
    help="What takes so much longer than before, or than the fastest pair, is not yet slow.",
)  # fmt: skip
@click.option("--device", metavar="DEVICE", help="As of rankwise.init(): cpu, for example.")
@click.option(
    "--timeout", type=click.FloatRange(0, _LONGEST, min_open=True), default=30.0, show_default=True,
    metavar="SECONDS", help="How long ranks wait for each other, in each call.",
)  # fmt: skip
def bench(
    *,
    collectives: tuple[str, ...],
    nproc: int | None,
    smallest: int,
    largest: int,
    pairs: bool,
    **options: Any,  # noqa: ANN401 - passed on
) -> None:
    """Measure collectives of rankwise beside the backend's own, or name slow hosts.

    Run it in place of a script: srun rankwise bench. COLLECTIVE is all_reduce, all_gather, broadcast (by default these
    three), reduce_scatter, all_to_all or barrier. Sizes, algbw and busbw are those of nccl-tests. The time is that of
    the slowest rank; the limit is a copy in memory by all ranks at once, or between hosts the slowest link.

    The exit status is 1 if a row of --against or a host of --pairs is slow.
    """
    require_torch("rankwise bench")
    from rankwise._bench.operations import OPERATIONS  # noqa: PLC0415 - it imports torch

    if unknown := [name for name in collectives if name not in OPERATIONS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(OPERATIONS)}", param_hint="COLLECTIVE")
    if smallest > largest:
        raise click.BadParameter(f"{smallest} is more than --maxbytes {largest}", param_hint="--minbytes")
    if pairs and (collectives or options["file"] or options["plot"] or options["against"]):
        raise click.UsageError("--pairs measures no collectives, and takes no --csv, --plot or --against")
    sizes = [smallest]
    while sizes[-1] * _FACTOR <= largest:
        sizes.append(sizes[-1] * _FACTOR)
    names = dict.fromkeys(collectives or ("all_reduce", "all_gather", "broadcast"))
    steps = [(name, size) for name in names for size in (sizes if OPERATIONS[name].has_data else [0])]
    run = functools.partial(bench_as_rank, steps=[] if pairs else steps, **options)
    if nproc is None:
        run()
        return
    from rankwise.launching import FunctionLaunch, Output  # noqa: PLC0415 - not needed under a launcher

    try:
        FunctionLaunch(run, nproc=nproc, output=Output(prefix=False)).run()
    except RankFailedError as error:
        if error.exitcode not in {_IS_SLOW, _MISUSED} or error.traceback:
            raise
        sys.exit(error.exitcode)


def bench_as_rank(
    *,
    steps: Sequence[tuple[str, int]],
    tolerance: float,
    device: str | None,
    timeout: float,
    plot: str,
    **options: Any,  # noqa: ANN401 - passed on
) -> None:
    """Measure collectives at sizes as one rank, or pairs if there are none; rank zero prints.

    Raises:
        SystemExit: Something is slow, or cannot be measured as asked.
        RankwiseError: The ranks could not join, one was lost, or the output cannot be written.
    """
    from rankwise._bench import results  # noqa: PLC0415 - not needed for --help
    from rankwise._bench.measuring import AgreedError  # noqa: PLC0415 - it imports torch
    from rankwise._session.api import init  # noqa: PLC0415

    old: list[Row] = []
    rows: list[Row] = []
    problem, is_slow = "", False
    with init(device=device, timeout=timeout) as session:
        say = _nothing if session.rank else _print
        try:
            if steps:
                old, rows = _measure(session, say, steps, **options)
            else:
                is_slow = _name_slow(session, say, tolerance)
        except AgreedError as error:
            problem = str(error)
    if problem:
        if session.rank:
            time.sleep(_RANK_ZERO_SECONDS)
        else:
            click.echo(f"rankwise: {printable(problem)}", err=True)
        sys.exit(_MISUSED)
    if old:
        lines, is_slow = results.compare(old, rows, tolerance)
        say("\n".join(lines))
    if plot and not session.rank:
        results.plot(rows, Path(plot))
    if is_slow and not session.rank:
        sys.exit(_IS_SLOW)


def _measure(
    session: Session,
    say: Say,
    steps: Sequence[tuple[str, int]],
    *,
    dtype: str,
    seconds: float,
    file: str,
    against: str,
) -> tuple[list[Row], list[Row]]:
    """Print and write rows as they are measured; return those of the old file, on rank zero, and the new ones."""
    import torch  # noqa: PLC0415 - as above

    from rankwise._bench import results  # noqa: PLC0415
    from rankwise._bench.measuring import agree, environment, measure  # noqa: PLC0415

    where = environment(session)
    notes = [results.describe(where)]
    if session.world_size == 1:
        notes.append("# one rank sends nothing: these are the costs of the calls alone, without busbw")
    old: list[Row] = []
    rows: list[Row] = []
    problem, write = "", file and not session.rank
    try:
        if against and not session.rank:
            old = results.read(Path(against))
            notes += [f"# other than in {against}: {text}" for text in results.differences(old[-1], where)]
        if write:
            results.write(Path(file), [], begin=True)
    except InvalidArgumentError as error:
        problem = str(error)
    agree(problem)
    say("\n".join([*notes, results.HEADER]))
    with _bar(len(steps), is_shown=not session.rank) as advance:
        for name, size in steps:
            found = measure(session, where, name, size, dtype=getattr(torch, dtype), seconds=seconds)
            if not rows or found[-1].key != rows[-1].key:  # several small sizes are that of an element of each rank
                say("\n".join(map(str, found)))
                rows += found
                if write:
                    results.write(Path(file), found)
            advance(f"{name} {size}")
    return old, rows


def _name_slow(session: Session, say: Say, tolerance: float) -> bool:
    """Compare pairs, and print who is slow; return whether somebody is."""
    from rankwise._bench.measuring import agree  # noqa: PLC0415 - as above
    from rankwise._bench.pairs import find_slow, members  # noqa: PLC0415

    agree("--pairs compares at least two ranks, and there is one" if session.world_size == 1 else "")
    names = members(session)
    found, slow = find_slow(session, list(names), tolerance)
    for one in found:
        first, second = (names[rank] for rank in one.partners)
        say(f"round {one.round}  {one.bandwidth:8.3f} GB/s  {first} with {second}")
    best = max(one.bandwidth for one in found)
    for rank in slow:
        own = max(one.bandwidth for one in found if rank in one.partners)
        say(f"SLOW  {names[rank]}: at most {own:.3f} GB/s, {best / own:.1f} times slower than the fastest pair")
    if len(names) == 2:
        say("of two, none can be named as the slow one: there has to be a third")
    elif not slow:
        say(f"OK    nobody is more than {1 + tolerance:g} times slower than the fastest pair")
    return bool(slow)


@contextlib.contextmanager
def _bar(total: int, *, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield what is called after each row: on a terminal, with rich, it moves a bar below the rows."""
    from rankwise.cli.env_tables import is_terminal  # noqa: PLC0415 - other commands do without what it imports

    if not is_shown or not is_terminal() or importlib.util.find_spec("rich") is None:
        yield _nothing
        return
    from rich.progress import Progress  # noqa: PLC0415 - optional

    with Progress(transient=True, auto_refresh=False) as progress:  # no thread beside what is measured
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text, refresh=True)


def _print(text: str) -> None:
    echo(printable(text))
    sys.stdout.flush()


def _nothing(_: object) -> None: ...
