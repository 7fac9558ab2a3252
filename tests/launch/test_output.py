"""The output of ranks reaches the streams of the launcher: complete, and with the rank as prefix."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._launch.output.console import Console
from tests.session.worlds import clean_environ

LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch"]


BARS = """
import os, sys, time
from rich.progress import Progress
from tqdm import trange
rank = os.environ["RANK"]
if rank == "0":
    print("rank zero:", sys.stdout.isatty(), sys.stderr.isatty())
for i in range(5):
    sys.stderr.write(f"\\rbar {i}"); sys.stderr.flush(); time.sleep(0.02)
print(file=sys.stderr)
for _ in trange(3, desc="outer"):
    for _ in trange(3, desc="inner", leave=False):
        time.sleep(0.02)
with Progress(refresh_per_second=50) as progress:
    tasks = [progress.add_task("[green]" + name, total=5) for name in ("a", "b")]
    for _ in range(5):
        for task in tasks:
            progress.advance(task)
        time.sleep(0.05)
print("after the bars", rank)
for _ in range(2000):
    print(rank + "x" * 1000)
open("printed" + rank, "w").close()
while not (os.path.exists("printed0") and os.path.exists("printed1")):
    time.sleep(0.02)
if rank == "1":
    raise RuntimeError("boom")
time.sleep(100)
"""


def on_terminal(command: list[str], cwd: Path | None = None) -> tuple[str, int]:
    """Run a command in a terminal of its own, and return what it shows, and its exit status."""
    pid, terminal = pty.fork()
    if pid == 0:
        if cwd is not None:
            os.chdir(cwd)
        os.execv(command[0], command)  # noqa: S606
    text = read_to_end(terminal)
    os.close(terminal)
    return text.decode(errors="replace"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_to_end(terminal: int) -> bytes:
    """Read what is shown on a terminal, until no process has it any more."""
    text = b""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 1 << 16):
            text += data
    return text


def show(*pieces: tuple[int, str], nproc: int = 2, **settings: object) -> str:
    """Return the text that is shown for pieces that ranks write, one after the other."""
    stream = io.StringIO()
    screen = Console(nproc=nproc, **settings)  # type: ignore[arg-type]
    lines = {rank: screen.open(rank, stream) for rank in range(nproc)}
    for rank, text in pieces:
        lines[rank].write(text.encode())
    for line in lines.values():
        line.flush()
    return stream.getvalue()


def test_lines_are_whole_and_say_whose_they_are() -> None:
    assert show((0, "a"), (1, "x\ny"), (0, "b\n"), (1, "z\n")) == "[1] x\n[0] ab\n[1] yz\n"
    assert show((10, "a\n"), (3, "b\n\n"), nproc=11) == "[10] a\n[ 3] b\n[ 3] \n"
    assert show((0, "a\n"), (1, "b\n"), prefixed=False) == "a\nb\n"
    assert show((0, "a\n"), nproc=1) == "a\n"
    assert show((0, "a\n"), (1, "b\n"), (2, "c\n"), nproc=3, shown={0, 2}) == "[0] a\n[2] c\n"


def test_a_line_without_an_end_is_shown_at_the_end_on_its_own() -> None:
    assert show((0, "no end"), (1, "also")) == "[0] no end\n[1] also"
    assert show((0, "x" * 70_000)) == "[0] " + "x" * 70_000


def test_an_unfinished_line_of_one_stream_leaves_the_other_alone() -> None:
    """As with `2> errors.log`: that file gets no line breaks because of output in another one."""
    output, errors = io.StringIO(), io.StringIO()
    screen = Console(nproc=2)
    first = screen.open(0, output)
    first.write(b"name? ")
    first.flush()
    screen.open(1, errors).write(b"y\n")
    first.write(b"me\n")
    assert (output.getvalue(), errors.getvalue()) == ("[0] name? me\n", "[1] y\n")


def test_progress_bars_go_back_to_the_beginning_of_their_line() -> None:
    assert show((0, "\r10%"), (0, "\r20%"), (0, "\r30%\n")) == "[0] \r[0] 10%\r[0] 20%\r[0] 30%\n"


def test_a_terminal_shows_lines_of_others_above_a_progress_bar() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        screen = Console(nproc=2)
        first, second = (screen.open(rank, terminal) for rank in range(2))
        first.write(b"\r 5%|#    |")
        second.write(b"\r20%|##   |")  # only one bar is shown
        second.write(b"\r99%|#####|\nx\n")
        first.write(b"\r10%|#    | 1 of 10 steps\r")
        first.write(b"done\n")
        second.write(b"\r30%")
        second.flush(last=True)
        text = ""
        while "\r\n" not in text[text.find("30%") :]:  # a terminal passes on what it is given in parts
            text += os.read(ours, 10_000).decode()
    os.close(ours)
    bar, other, erase = "\x1b[36m[0] \x1b[0m", "\x1b[32m[1] \x1b[0m", "\x1b[2K"
    assert text.split("\r")[:6] == [
        f"{bar} 5%|#    |",
        f"{erase}{other}99%|#####|", f"\n{other}x", f"\n{bar} 5%|#    |",
        f"{erase}{bar}10%|#    | 1 of", f"{erase}{bar}done",
    ]  # fmt: skip
    assert text.endswith(f"\n{other}30%\r{erase}{other}30%\r\n")


def test_bars_in_several_lines_of_rank_zero_stay_below_the_lines_of_others() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        screen = Console(nproc=2)
        first, second = (screen.open(rank, terminal) for rank in range(2))
        assert first.is_live
        assert not second.is_live
        assert first.window_size() == (24, 20 - len("[0] "))
        first.write(b"one\ntwo\r\x1b[2K\x1b[1A\x1b[2KONE\nTWO")
        second.write(b"\r20%")  # not shown beside those of rank zero
        second.write(b"\rx\n")
        first.write(b"\r\x1b[2K\x1b[1A\x1b[2Kone\ntwo\n\x1b[?25h")
        first.write(b"end\n")
        second.write(b"y\n")
        text = ""
        while "y\r\n" not in text:
            text += os.read(ours, 10_000).decode()
    os.close(ours)
    zero, one = "\x1b[36m[0] \x1b[0m", "\x1b[32m[1] \x1b[0m"
    up = "\r\x1b[2K\x1b[1A\x1b[2K"
    assert text.replace("\r\n", "\n") == (
        f"one\ntwo{up}ONE\nTWO"
        f"\r\x1b[A\x1b[J{one}x\n\n"
        f"{up}one\ntwo\n{zero}\x1b[?25hend\n{one}y\n"
    )  # fmt: skip


@pytest.mark.slow
def test_bars_of_all_ranks_on_a_terminal_end_neither_the_output_nor_the_report(tmp_path: Path) -> None:
    """Carriage returns, tqdm, and rich with colours, on all ranks; then 4 MB of lines; then an error."""
    script = tmp_path / "bars.py"
    script.write_text(BARS)
    shown, status = on_terminal([*LAUNCH, "-n", "2", str(script)], cwd=tmp_path)
    assert status == 1
    for rank in range(2):
        assert shown.count(f"{rank}{'x' * 1000}") == 2000
        assert f"after the bars {rank}" in shown
    assert "RuntimeError: boom" in shown
    assert "discarded" not in shown
    assert "rank zero: True True" in shown
    assert "\x1b[2K\x1b[1A" in shown, "rich draws its bars in place on rank zero"


@pytest.mark.slow
def test_the_size_of_the_window_follows_that_of_the_terminal(tmp_path: Path) -> None:
    script = tmp_path / "size.py"
    script.write_text(
        "import os, time\n"
        "print('at first', os.get_terminal_size(1).columns, flush=True) if os.environ['RANK'] == '0' else None\n"
        "while os.environ['RANK'] == '0' and os.get_terminal_size(1).columns != 56:\n"
        "    print('.', flush=True)\n    time.sleep(0.01)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(LAUNCH[0], [*LAUNCH, "-n", "2", str(script)])  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    text = b""
    while b"at first" not in text:
        text += os.read(terminal, 10_000)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    text += read_to_end(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_a_prompt_is_shown_before_its_line_ends() -> None:
    stream = io.StringIO()
    lines = Console(nproc=2).open(0, stream)
    lines.write(b"name? ")
    assert stream.getvalue() == ""
    lines.flush()
    assert stream.getvalue() == "[0] name? "
    lines.write(b"thanks\n")
    assert stream.getvalue() == "[0] name? thanks\n"


def test_a_function_prints_where_its_caller_does(capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("out", rw.get_rank())  # noqa: T201
        sys.stderr.write(f"err {rw.get_rank()}\n")
        os.write(1, b"from compiled code\n")

    rw.launch(talk, nproc=2)
    seen = capsys.readouterr()
    assert sorted(seen.out.splitlines()) == [
        "[0] from compiled code", "[0] out 0", "[1] from compiled code", "[1] out 1",
    ]  # fmt: skip
    assert sorted(seen.err.splitlines()) == ["[0] err 0", "[1] err 1"]


@pytest.mark.slow
def test_long_lines_of_many_ranks_are_not_torn(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("import os\nfor _ in range(50):\n    print(os.environ['RANK'] * 20_000)\n")
    ended = subprocess.run(
        [*LAUNCH, "-n", "3", "--show", "0,2", str(script)],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    lines = ended.stdout.splitlines()
    assert sorted(lines) == [f"[{rank}] {str(rank) * 20_000}" for rank in (0, 2) for _ in range(50)]


@pytest.mark.slow
def test_a_terminal_gets_colours_and_one_rank_gets_the_terminal(tmp_path: Path) -> None:
    script = tmp_path / "tty.py"
    script.write_text("import sys\nprint(sys.stdout.isatty())\n")
    for nproc, wanted in ((1, ["True"]), (2, ["\x1b[36m[0] \x1b[0mTrue", "\x1b[32m[1] \x1b[0mFalse"])):
        ours, theirs = pty.openpty()
        subprocess.run(
            [*LAUNCH, "-n", str(nproc), str(script)], env=clean_environ(), stdout=theirs, timeout=200, check=True
        )
        os.close(theirs)
        assert sorted(os.read(ours, 10_000).decode().split("\r\n")[:-1]) == sorted(wanted)
        os.close(ours)


@pytest.mark.slow
def test_a_terminal_shows_that_ranks_start_and_how_long_they_took(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("print('x')\n")
    ours, theirs = pty.openpty()
    subprocess.run(
        [*LAUNCH, "-n", "2", "--show", "1", str(script)], stdout=theirs, stderr=theirs, timeout=200, check=True
    )
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    assert re.fullmatch(
        r"rankwise: starting 2 ranks\r\x1b\[2K\x1b\[32m\[1\] \x1b\[0mx\r\nrankwise: 2 ranks, \d+\.\d s\r\n", text
    ), repr(text)


@pytest.mark.slow
def test_the_line_of_the_start_is_gone_when_ranks_run_and_control_codes_get_no_prefix(tmp_path: Path) -> None:
    script = tmp_path / "quiet.py"
    script.write_text("import sys\nsys.stdout.write('\\x1b[?25h')\n")
    text, status = on_terminal([*LAUNCH, "-n", "2", str(script)])
    assert status == 0
    assert re.fullmatch(
        r"rankwise: starting 2 ranks\r\x1b\[2K(\x1b\[\?25h){2}rankwise: 2 ranks, \d+\.\d s\r\n", text
    ), repr(text)


@pytest.mark.slow
def test_a_progress_bar_keeps_the_last_line_of_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    program = Path(__file__).parent / "programs" / "bar.py"
    subprocess.run(
        [*LAUNCH, "-n", "2", str(program), str(tmp_path)],
        env=clean_environ(), stdout=theirs, stderr=theirs, timeout=200, check=True,
    )  # fmt: skip
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    shown: list[str] = []
    for line in text.split("\n")[:-2]:  # the last one is the launcher's
        shown += [line.rstrip("\r").split("\x1b[2K")[-1]]  # what stays after the line was erased
    bar, other = "\x1b[36m[0] \x1b[0m", "\x1b[32m[1] \x1b[0m"
    assert sorted(shown) == [f"{other}line 1", f"{other}line 3", f"{other}line 5", f"{bar}6/6|######"]


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("import time\nfor _ in range(3000):\n    print('line')\n    time.sleep(0.01)\n")
    launcher = subprocess.Popen(
        [*LAUNCH, "-n", "2", str(script)],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    assert launcher.stdout.readline().endswith("line\n")
    launcher.stdout.close()
    with launcher:
        assert "BrokenPipeError" in launcher.stderr.read()
    assert launcher.returncode == 120, "that of Python, which cannot write at its end what is left"
