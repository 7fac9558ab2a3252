"""The rows of `rankwise bench`: as text, in CSV files with the environment in each row, compared, and in a plot."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from rankwise._dependencies import missing_package
from rankwise.errors import InvalidArgumentError, RankwiseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and with what a row was measured.

    Attributes:
        ranks, hosts: Their numbers.
        backend: That of the device.
        device: The name of the accelerator, or "cpu".
        host: The host of rank zero.
        rankwise, torch, python, nccl: Versions; "" without NCCL.
        date: In UTC.
    """

    ranks: int
    hosts: int
    backend: str
    device: str
    host: str
    rankwise: str
    torch: str
    python: str
    nccl: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Environment):
    """The times of one collective at one size, ours or the backend's.

    Attributes:
        collective, type, op: Its name, dtype and reduction; "none" if it has none.
        size, count: Bytes, and elements of a rank, as nccl-tests count them.
        by: "rankwise", or the name of the backend.
        time_us: The time of a call on the slowest rank: mean of a block of calls, median of the blocks.
        algbw, busbw, limit: In GB/s, of 10^9 bytes; 0 for what moves no data.
        p50_us, p99_us: Of single calls.
        calls: How many were timed.
    """

    collective: str
    size: int
    count: int
    type: str
    op: str
    by: str
    time_us: float
    algbw: float
    busbw: float
    p50_us: float
    p99_us: float
    limit: float
    calls: int

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What it has in common with the old row that it is compared with."""
        return self.collective, self.size, self.type, self.by

    def __str__(self) -> str:
        return " ".join(f"{getattr(self, name):{width}{form}}" for name, (_, width, form) in _SHOWN.items())


# The columns of the text: title, width, format.
_SHOWN: Final = {
    "collective": ("collective", "<14", ""),
    "size": ("size(B)", ">10", ""),
    "count": ("count", ">10", ""),
    "type": ("type", ">8", ""),
    "op": ("op", ">4", ""),
    "by": ("by", "<8", ""),
    "time_us": ("time(us)", ">10", ".1f"),
    "algbw": ("algbw", ">7", ".2f"),
    "busbw": ("busbw", ">7", ".2f"),
    "p50_us": ("p50(us)", ">10", ".1f"),
    "p99_us": ("p99(us)", ">10", ".1f"),
    "limit": ("limit", ">7", ".2f"),
}
HEADER: Final = " ".join(f"{title:{width}}" for title, width, _ in _SHOWN.values())
COLUMNS: Final = [each.name for each in (*fields(Row)[len(fields(Environment)) :], *fields(Environment))]
# Rows that differ in these are not compared; a difference in the others is said.
_SAME: Final = ("ranks", "hosts", "backend", "device")
_OTHERS: Final = ("host", "rankwise", "torch", "python", "nccl")
_PARSE: Final[Mapping[str, Callable[[Any], Any]]] = {"int": int, "float": float, "str": str}


def describe(where: Environment) -> str:
    """Return the environment as a line."""
    versions = f"rankwise {where.rankwise}, torch {where.torch}, Python {where.python}, NCCL {where.nccl or 'none'}"
    place = f"ranks: {where.ranks}, hosts: {where.hosts}, from {where.host}; {where.backend} on {where.device}"
    return f"# {place}; {versions}; {where.date}"


def write(path: Path, rows: Iterable[Row], *, begin: bool = False) -> None:
    """Add rows to a file, or begin a new one.

    Raises:
        InvalidArgumentError: It cannot be written.
    """
    try:
        with path.open("w" if begin else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if begin:
                writer.writeheader()
            writer.writerows(map(asdict, rows))
    except OSError as error:
        raise InvalidArgumentError(f"--csv {path} cannot be written: {error.strerror}") from error


def read(path: Path) -> list[Row]:
    """Return the rows of a file.

    Raises:
        InvalidArgumentError: It cannot be read, or is no such file.
    """
    number = 1
    rows = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for each in reader:
                number = reader.line_num
                rows.append(_parsed(each))
    except OSError as error:
        raise InvalidArgumentError(f"--against {path} cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise InvalidArgumentError(
            f"--against {path} is no file of rankwise bench --csv: line {number}: {error}"
        ) from error
    if not rows:
        raise InvalidArgumentError(f"--against {path} is no file of rankwise bench --csv: it has no rows")
    return rows


def _parsed(values: Mapping[str, str | None]) -> Row:
    missing = [name for name in COLUMNS if values.get(name) is None]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    row = Row(**{one.name: _PARSE[str(one.type)](values[one.name]) for one in fields(Row)})
    if not 0 < row.time_us < math.inf:
        raise ValueError(f"time_us is {row.time_us}")
    return row


def differences(old: Environment, new: Environment) -> Iterator[str]:
    """Yield in what the environments differ that may explain another time.

    Raises:
        InvalidArgumentError: Their rows cannot be compared.
    """
    texts = {name: f"{name} {before}, now {now}" for name in (*_SAME, *_OTHERS)
             if (before := getattr(old, name)) != (now := getattr(new, name))}  # fmt: skip
    if bad := [text for name, text in texts.items() if name in _SAME]:
        raise InvalidArgumentError(
            f"--against: its rows are of another environment, and are not compared: {', '.join(bad)}"
        )
    yield from texts.values()


def compare(old: Sequence[Row], new: Sequence[Row], tolerance: float) -> tuple[list[str], bool]:
    """Return a line for each row that both have, and whether one is slower by more than the tolerance, a share.

    Raises:
        RankwiseError: There is no row that both have.
    """
    before = {row.key: row for row in old}
    ratios = {row: row.time_us / before[row.key].time_us for row in new if row.key in before}
    if not ratios:
        raise RankwiseError("--against: the file has no row with one of these collectives, sizes and types")
    lines = []
    for row, ratio in ratios.items():
        times = f"{before[row.key].time_us:>10.1f} us before, {row.time_us:>10.1f} us now: {ratio:6.2f}"
        verdict = f"  SLOWER by more than {tolerance:.0%}" if ratio > 1 + tolerance else ""
        lines.append(f"{row.collective:<14} {row.size:>10} {row.by:<8} {times}{verdict}")
    return lines, max(ratios.values()) > 1 + tolerance


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the bandwidth by the size, of ours, the backend's own and the limit, in a panel for each collective.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        RankwiseError: The file cannot be written, or its suffix is that of no format.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError as error:
        raise missing_package("--plot", "matplotlib") from error
    speed = "algbw" if rows[0].ranks == 1 else "busbw"
    names = list(dict.fromkeys(row.collective for row in rows if row.size))
    figure = Figure(figsize=(1 + 4 * max(1, len(names)), 4), layout="constrained")
    figure.suptitle(describe(rows[0]).removeprefix("# "), fontsize=7)
    for number, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), number, title=name, xlabel="bytes", xscale="log", yscale="log")
        axes.set_ylabel(f"{speed}, GB/s")
        mine = [row for row in rows if row.collective == name]
        for by in dict.fromkeys(row.by for row in mine):
            axes.plot(*zip(*((row.size, getattr(row, speed)) for row in mine if row.by == by), strict=True), label=by)
        axes.plot(*zip(*((row.size, row.limit) for row in mine), strict=True), linestyle="--", label="limit")
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise RankwiseError(f"--plot {path}: {error}") from error
