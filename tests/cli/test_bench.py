"""`rankwise bench`: the columns, the files, the comparison, and errors that name the rank. No time is asserted."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rankwise._bench.measuring import AgreedError, agree
from rankwise._bench.operations import OPERATIONS
from rankwise._bench.pairs import Exchange, fast_members, first_round
from rankwise._bench.results import COLUMNS, HEADER, Row, compare, differences, plot, read
from rankwise._session.session import Session
from rankwise.cli.main import main
from rankwise.errors import InvalidArgumentError, RankwiseError
from tests.cli.test_env_command import RANKWISE, SECONDS
from tests.cli.test_env_ranks import run_all, world
from tests.lanes import variants
from tests.session.worlds import clean_environ
from tests.tables import each_row

PROGRAM = Path(__file__).parent / "programs" / "bench_rank.py"
QUICK = ("--maxbytes", "64", "--seconds", "0")
ROW = Row(
    collective="all_reduce", size=1024, count=256, type="float32", op="sum", by="rankwise", time_us=10.0, algbw=0.1,
    busbw=0.15, p50_us=9.0, p99_us=20.0, limit=5.0, calls=100, ranks=4, hosts=1, backend="gloo", device="cpu",
    host="vm", rankwise="1", torch="2", python="3", nccl="", date="2026-01-01",
)  # fmt: skip


def bench(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RANKWISE, "bench", *args],
        env=clean_environ(**variables), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def bench_here(*args: str) -> Result:
    """Run the command in this process, which is a world of one then."""
    return CliRunner().invoke(main, ["bench", *args, *QUICK])


def rows_of(out: str) -> list[dict[str, str]]:
    """Return the rows of the text, by column."""
    names = HEADER.split()
    lines = out.partition(HEADER + "\n")[2].splitlines()
    return [dict(zip(names, line.split(), strict=True)) for line in lines]


# What nccl-tests define, at 4 ranks and 64 bytes: size, elements, busbw by algbw.
NCCL: list[tuple[str, int, int, float]] = [
    ("all_reduce", 64, 16, 1.5),
    ("broadcast", 64, 16, 1.0),
    ("all_gather", 64, 4, 0.75),
    ("reduce_scatter", 64, 4, 0.75),
    ("all_to_all", 64, 4, 0.75),
    ("barrier", 0, 0, 0.0),
]


@pytest.mark.slow
def test_each_collective_is_measured_on_ranks_started_here(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    ended = bench(*OPERATIONS, "-n", "4", "--minbytes", "64", *QUICK, "--csv", str(file))
    assert ended.returncode == 0, ended.stderr
    rows = read(file)
    assert [row["by"] for row in rows_of(ended.stdout)] == ["rankwise", "gloo"] * len(OPERATIONS)
    assert [str(row) for row in rows] == ended.stdout.partition(HEADER + "\n")[2].splitlines()
    assert {(row.ranks, row.hosts, row.backend, row.device) for row in rows} == {(4, 1, "gloo", "cpu")}
    found = {row.collective: row for row in rows}
    assert list(found) == [name for name, *_ in sorted(NCCL, key=lambda one: [*OPERATIONS].index(one[0]))]
    for name, size, count, factor in NCCL:
        row = found[name]
        assert (row.size, row.count) == (size, count), name
        assert row.busbw == pytest.approx(row.algbw * factor), name
        assert row.algbw == pytest.approx(size / row.time_us / 1e3), name
        assert (row.limit > 0) == (size > 0)
        assert 0 < row.p50_us <= row.p99_us
        assert row.calls >= 5


def test_alone_it_says_what_it_can_measure_and_without_matplotlib_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = bench_here("all_reduce", "--plot", str(tmp_path / "plot.svg"))
    assert "# one rank sends nothing" in ended.stdout
    assert {row["busbw"] for row in rows_of(ended.stdout)} == {"0.00"}
    assert [row["size(B)"] for row in rows_of(ended.stdout)][::2] == ["4", "16", "64"]
    assert ended.stderr.startswith("rankwise: --plot needs the package 'matplotlib'")
    assert ended.stderr.endswith("pip install matplotlib\n")
    assert ended.exit_code == 1


MISUSES: list[tuple[tuple[str, ...], str]] = [
    (("all_reduc",), "'all_reduc' is none of all_reduce, broadcast"),
    (("--maxbytes", "64Q"), "'64Q' is no number of bytes, such as 8, 64K, 64M or 1G"),
    (("--minbytes", "0"), "'0' is no number of bytes"),
    (("--minbytes", "1K", "--maxbytes", "1"), "1024 is more than --maxbytes 1"),
    (("--dtype", "float3"), "'float3' is not one of"),
    (("--pairs", "--csv", "x"), "--pairs measures no collectives"),
]


@each_row(("args", "text"), MISUSES)
def test_a_misuse_is_an_error_of_the_command_line(args: tuple[str, ...], text: str) -> None:
    ended = CliRunner().invoke(main, ["bench", *args])
    assert text in ended.output
    assert ended.exit_code == 2


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--pairs",), "--pairs compares at least two ranks, and there is one"),
    (("--csv", "/nosuch/rows.csv"), "--csv /nosuch/rows.csv cannot be written: No such file or directory"),
    (("--csv", "/dev/full"), "--csv /dev/full cannot be written: No space left on device"),
    (("--against", "/nosuch/rows.csv"), "--against /nosuch/rows.csv cannot be read: No such file or directory"),
    (("--against", __file__), "is no file of rankwise bench --csv: line "),
    (("--device", "cuda:77"), "device='cuda:77' is not on this host"),
]


@each_row(("args", "text"), REFUSED)
def test_what_cannot_be_measured_as_asked_is_an_error_of_one_line(args: tuple[str, ...], text: str) -> None:
    ended = bench_here(*args)
    assert text in ended.stderr
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)


def old_file(folder: Path, *rows: Row) -> Path:
    file = folder / "old.csv"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, name) for name in COLUMNS] for row in rows)
    return file


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, by="gloo", host='a,b\n"c"', time_us=1e-3)]
    assert read(old_file(tmp_path, *rows)) == rows


GARBAGE: list[tuple[bytes, str]] = [
    (b"", "it has no rows"),
    (b"\xff\xfe", "invalid start byte"),
    (b"collective,size\nall_reduce,8\n", "line 2: it has no count"),
    (b"\x00\n\x00\n", "line "),
]


@each_row(("content", "text"), GARBAGE)
def test_garbage_in_the_place_of_rows_is_named(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        read(tmp_path / "old.csv")


@each_row(("value", "text"), [("x", "could not convert"), ("0", "time_us is 0.0"), ("nan", "time_us is nan")])
def test_a_time_that_is_none_is_named(value: str, text: str, tmp_path: Path) -> None:
    file = old_file(tmp_path, ROW)
    file.write_text(file.read_text().replace(",10.0,", f",{value},"))
    with pytest.raises(InvalidArgumentError, match=f"old.csv is no file of rankwise bench --csv: line 2: {text}"):
        read(file)


def test_rows_are_compared_one_by_one() -> None:
    old = [ROW, replace(ROW, by="gloo"), replace(ROW, size=4096)]
    new = [replace(ROW, time_us=15.0), replace(ROW, by="gloo", time_us=9.0), replace(ROW, size=8)]
    lines, is_slower = compare(old, new, 0.4)
    assert is_slower
    assert [line.partition("now: ")[2].strip() for line in lines] == ["1.50  SLOWER by more than 40%", "0.90"]
    assert not compare(old, new, 0.6)[1]
    with pytest.raises(RankwiseError, match="no row with one of these collectives"):
        compare(old, new[2:], 0.4)


def test_another_environment_is_refused_or_said() -> None:
    assert list(differences(ROW, replace(ROW, torch="3", date="later"))) == ["torch 2, now 3"]
    with pytest.raises(InvalidArgumentError, match="not compared: ranks 4, now 8, device cpu, now H100"):
        list(differences(ROW, replace(ROW, ranks=8, device="H100", torch="3")))


def test_a_slower_row_is_the_exit_status(tmp_path: Path) -> None:
    file = tmp_path / "old.csv"
    assert bench_here("barrier", "--csv", str(file)).exit_code == 0
    same = bench_here("barrier", "--against", str(file), "--tolerance", "1000000")
    assert (same.exit_code, same.stdout.count("us before,"), same.stderr) == (0, 2, "")
    rows = [replace(row, time_us=1e-6, torch="0.1") for row in read(file)]
    slower = bench_here("barrier", "--against", str(old_file(tmp_path, *rows)))
    assert (slower.exit_code, slower.stdout.count("SLOWER by more than 50%"), slower.stderr) == (1, 2, "")
    assert f"# other than in {file}: torch 0.1, now " in slower.stdout
    other = bench_here("barrier", "--against", str(old_file(tmp_path, *[replace(row, ranks=2) for row in rows])))
    assert (other.exit_code, "ranks 2, now 1" in other.stderr) == (2, True)


def test_a_plot_has_a_panel_for_each_collective(tmp_path: Path) -> None:
    rows = [replace(ROW, collective=name, by=by, size=size) for name in ("all_reduce", "broadcast")
            for by in ("rankwise", "gloo") for size in (8, 64)]  # fmt: skip
    plot([*rows, replace(ROW, collective="barrier", size=0, limit=0.0)], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("all_reduce", "broadcast", "gloo", "limit", "busbw, GB/s"))
    assert "<!-- barrier -->" not in drawn
    for name, text in (("plot.nosuch", "is not supported"), ("nosuch/plot.svg", "No such file")):
        with pytest.raises(RankwiseError, match=text):
            plot(rows, tmp_path / name)


def test_the_first_round_has_everybody_and_the_second_who_was_slow() -> None:
    for size in range(2, 9):
        pairs = first_round(range(size))
        assert {rank for pair in pairs for rank in pair} == set(range(size))
    found = [Exchange(round=1, partners=pair, bandwidth=speed) for pair, speed in (((0, 1), 1.0), ((2, 3), 0.5))]
    assert fast_members(found, 0.3) == {0, 1}
    assert fast_members(found, 1.0) == {0, 1, 2, 3}


@pytest.mark.rare
def test_pairs_of_ranks_of_one_host() -> None:
    ended = bench("--pairs", "-n", "3", "--tolerance", "1000")
    assert ended.returncode == 0, ended.stderr
    assert [line.split(" GB/s  ")[1] for line in ended.stdout.splitlines()[:3]] == [
        "rank 0 with rank 1", "rank 2 with rank 0", "rank 1 with rank 2",
    ]  # fmt: skip
    assert ended.stdout.splitlines()[3].startswith("OK")


@pytest.mark.ranks(2)
def test_what_is_wrong_on_one_rank_is_raised_on_all(session: Session) -> None:
    agree("")
    with pytest.raises(AgreedError, match=r"^rank 1 on .*: its disk is full$"):
        agree("its disk is full" if session.rank else "")


LOST = [("SIGKILL", "rank 1 is gone"), ("SIGSTOP", "Missing: rank 1")]


@contextlib.contextmanager
def faulty_rank(fault: str, side: str, *args: str) -> Iterator[list[subprocess.CompletedProcess[str]]]:
    """Run three ranks of which rank 1 has a fault; yield what the others end with, while a stopped rank exists."""
    first, environ, third = world(3)
    command = [sys.executable, str(PROGRAM), "bench", "all_reduce", *args]
    environ = clean_environ(**environ, FAULT=fault, SIDE=side)
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield run_all([[RANKWISE, *command[2:]]] * 2, [first, third])
        finally:
            process.kill()


@pytest.mark.parametrize("side", variants(["ours", "backends"], slow=["ours"]))
@pytest.mark.parametrize(("fault", "text"), variants(LOST, slow=LOST[:1]))
def test_a_lost_rank_is_named_by_the_others(fault: str, text: str, side: str) -> None:
    with faulty_rank(fault, side, "--maxbytes", "4", "--seconds", "1", "--timeout", "10") as others:
        assert [text in ended.stderr for ended in others] == [True, True], others
        assert [ended.returncode for ended in others] == [1, 1]


@pytest.mark.slow
def test_a_rank_with_too_little_memory_is_named_once() -> None:
    with faulty_rank("memory", "", *QUICK) as (first, third):
        assert "choose a smaller --maxbytes: MemoryError: no memory left" in first.stderr
        assert first.stderr.startswith(f"rankwise: rank 1 on {os.uname().nodename}: all_reduce of 4 bytes does not fit")
        assert (first.stderr.count("\n"), third.stderr) == (1, "")
        assert (first.returncode, third.returncode) == (2, 2)


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar_below_the_rows() -> None:
    reader, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    with os.fdopen(reader, "rb", buffering=0) as terminal, os.fdopen(side) as stdout:
        command = [RANKWISE, "bench", "all_reduce", *QUICK]
        with subprocess.Popen(command, env=clean_environ(TERM="xterm"), stdout=stdout, stderr=stdout) as process:
            stdout.close()
            shown = b""
            with contextlib.suppress(OSError):  # of a terminal whose other side is closed
                while part := terminal.read(1 << 16):
                    shown += part
        assert process.returncode == 0, shown
    assert "\u2501".encode() in shown, "a bar of rich"
    assert shown.count(b"rankwise  ") == 3, shown
