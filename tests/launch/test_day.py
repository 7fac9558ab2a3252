"""The commands of a day, as the documentation has them, and debugging: each in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lanes import variants

BIN = Path(sys.executable).parent
PAGE = Path(__file__).parents[2] / "docs" / "launchers.md"
PROMPT = "(Pdb) "
PROGRAMS = {
    "train.py": "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])",
    "stops.py": """
import rankwise as rw, torch
torch.set_num_threads(1)
session = rw.init()
value = session.rank + 41
if session.rank == 1:
    breakpoint()
rw.barrier("debugged", timeout=5)
print("sum", rw.all_reduce(value))
""",
    "fails.py": "import os\nif os.environ['RANK'] == '1':\n    wrong = 7\n    raise ValueError('of rank 1')",
    "waits.py": """
import time
print("up", flush=True)
try:
    time.sleep(100)
except KeyboardInterrupt:
    print("saved", flush=True)
""",
    "fails_once.py": """
import rankwise as rw
print("attempt", rw.restart_count())
assert rw.restart_count() > 0
""",
}
# For each command: what is typed after what was shown, what is shown at last, and the exit status.
Dialogue = tuple[Sequence[tuple[str, str]], Sequence[str], int]
BOTH = ("rank 0 of 2", "rank 1 of 2")
DAY: dict[str, Dialogue] = {
    "run": ([], BOTH, 0),
    "stop in a rank, with `breakpoint()`": ([(PROMPT, "p value\n"), (PROMPT, "c\n")], ["42", "sum 83"], 0),
    "stop in rank 1, at its first line": ([(PROMPT, "c\n")], ["import os", *BOTH], 0),
    "stop where rank 1 fails": (
        [(PROMPT, "c\n"), (PROMPT, "p wrong + 1\n"), (PROMPT, "q\n")],
        ["ValueError: of rank 1", "\r\n8\r\n", "rankwise: rank 1 of 2"],
        1,
    ),
    "see rank 1 only": ([], ["rank 1 of 2"], 0),
    "know when and where a line was printed": ([], ["T", *BOTH], 0),
    "keep a log of each rank": ([], BOTH, 0),
    "stop, and save a checkpoint first": ([("up", ""), ("up", "\x03")], ["saved"], 130),
    "go on after failures": ([], ["attempt 0", "attempt 1", "attempt 1 of 3 failed"], 0),
}


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, command: list[str], *, columns: int = 80) -> None:
        self.shown = ""
        self._read = 0
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            termios.tcsetwinsize(1, (24, columns))
            os.execvp(command[0], command)  # noqa: S606 - the command

    def expect(self, text: str) -> None:
        """Wait until a text is shown, after those that were waited for before."""
        deadline = time.monotonic() + 100
        while (at := self.shown.find(text, self._read)) < 0:
            assert self._receive(deadline), self.shown
        self._read = at + len(text)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def close(self) -> int:
        """Wait for the end of the command, and return its exit status."""
        deadline = time.monotonic() + 100
        while self._receive(deadline):
            pass
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _receive(self, deadline: float) -> bool:
        assert select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))[0], self.shown
        data = b""
        with contextlib.suppress(OSError):  # the command has ended
            data = os.read(self._descriptor, 1 << 16)
        self.shown += data.decode()
        return bool(data)


def talk(command: list[str], dialogue: Sequence[tuple[str, str]]) -> tuple[str, int]:
    terminal = Terminal(command)
    for shown, typed in dialogue:
        terminal.expect(shown)
        terminal.type(typed)
    status = terminal.close()
    return terminal.shown, status


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")


def rows() -> dict[str, tuple[str, str]]:
    section = PAGE.read_text().partition("### A day\n")[2].partition("\n#")[0]
    found = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) ?\|$", section, re.MULTILINE)
    return {what: (ours, theirs) for what, ours, theirs in found[2:]}


def commands(cell: str) -> list[list[str]]:
    return [text.split() for text in re.findall(r"`((?:rankwise|torchrun) [^`]+)`", cell)]


def test_the_table_of_a_day_has_these_lines() -> None:
    assert set(rows()) == set(DAY)


# Of what the others do, other tests look at more: --show, --log-dir, --max-restarts and so on.
SLOW = {"stop in rank 1, at its first line", "stop where rank 1 fails"}


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("what", variants(DAY, slow=SLOW))
def test_each_line_of_the_table_of_a_day(what: str) -> None:
    dialogue, expected, status = DAY[what]
    (command,) = commands(rows()[what][0])
    shown, ended = talk(command, dialogue)
    assert ended == status, shown
    assert [text for text in expected if text not in shown] == [], shown
    if what == "see rank 1 only":
        assert "rank 0 of 2" not in shown
    if what == "keep a log of each rank":
        assert {path.read_text() for path in Path("logs").rglob("stdout.log")} == {f"{line}\n" for line in BOTH}


@pytest.mark.rare
@pytest.mark.usefixtures("_here")
def test_torchrun_has_the_commands_that_the_table_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # it leaves folders there
    named = [command for _, cell in rows().values() for command in commands(cell)]
    assert len(named) == 4
    for command in named:
        shown, status = talk(command, [])
        assert status == 0, shown


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_a_rank_has_the_terminal_while_the_others_wait() -> None:
    # Longer than the timeout of the others, whose output comes after.
    terminal = Terminal(["rankwise", "launch", "-n", "2", "stops.py"])
    terminal.expect(PROMPT)
    time.sleep(6)
    terminal.type("p value\n")
    terminal.expect("42")
    terminal.type("\x03")
    terminal.expect("KeyboardInterrupt")
    terminal.expect(PROMPT)
    assert "sum" not in terminal.shown.rpartition(PROMPT)[2]
    terminal.type("c\n")
    assert terminal.close() == 0, terminal.shown
    assert terminal.shown.count("sum 83\r\n") == 2


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_a_slow_import_is_named_until_a_rank_prints(tmp_path: Path) -> None:
    Path("imports.py").write_text("import slow\nprint('imported', flush=True)\ninput()\n")
    Path("slow.py").write_text("import os, time\nwhile not os.path.exists('end'):\n    time.sleep(0.05)\n")
    terminal = Terminal(["rankwise", "launch", "-n", "2", "imports.py"], columns=40)
    terminal.expect("rankwise: importing (ranks 0-1: slow.py\r")
    (tmp_path / "end").touch()
    terminal.expect("imported")
    terminal.type("\n")
    terminal.close()
    assert "importing" not in terminal.shown.rpartition("imported")[2]


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_a_process_of_a_rank_without_input_cannot_start_a_debugger() -> None:
    Path("loads.py").write_text("""
from torch.utils.data import DataLoader
list(DataLoader([0], num_workers=1, collate_fn=lambda _: breakpoint(), multiprocessing_context="fork"))
""")
    shown, status = talk(["rankwise", "launch", "-n", "1", "loads.py"], [])
    assert status == 1, shown
    assert "cannot start a debugger: a rank has started it, such as a worker of a data loader" in shown
    assert PROMPT not in shown


LEAVE = ["q\n", "\x04", "import os; os.kill(os.getpid(), 9)\n"]


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("typed", variants(LEAVE, slow=LEAVE[:1]), ids=["q", "Ctrl-D", "SIGKILL"])
def test_a_rank_that_leaves_the_debugger_ends_the_launch(typed: str) -> None:
    shown, status = talk(["rankwise", "launch", "-n", "2", "stops.py"], [(PROMPT, typed)])
    assert status == (137 if "kill" in typed else 1), shown
    assert "rankwise: rank 1 of 2" in shown


@pytest.mark.rare
@pytest.mark.usefixtures("_here")
def test_ranks_stop_one_after_the_other_until_one_quits() -> None:
    Path("stops.py").write_text("for turn in range(2):\n    breakpoint()\n    print('turn', turn)")
    command = ["rankwise", "launch", "-n", "2", "stops.py"]
    shown, status = talk(command, [(PROMPT, "c\n")] * 2 + [(PROMPT, "q\n")])
    assert status == 1, shown
    assert shown.count(PROMPT) == 3, shown


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_without_a_terminal_another_rank_cannot_be_debugged() -> None:
    command = ["rankwise", "launch", "-n", "2", "stops.py"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert (
        "LaunchError: rank 1 cannot start a debugger: the launcher's standard input is not a terminal" in ended.stderr
    )
    Path("stops.py").write_text("import os\nif os.environ['RANK'] == '0': breakpoint()\nprint('done')")
    ended = subprocess.run(command, input="p 6 * 7\nc\n", capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "42" in ended.stdout


@pytest.mark.usefixtures("_here")
def test_ranks_to_debug_are_checked() -> None:
    for option, text in (
        (["--debug", "2"], "debug=2 is no rank"),
        (["--debugpy", "7"], "debugpy=7 is no rank"),
        (["--debug", "0", "--no-python"], "needs a Python script"),
    ):
        command = ["rankwise", "launch", "-n", "2", *option, "train.py"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert ended.returncode in {1, 2}
        assert text in ended.stderr


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    "how",
    variants(
        ["pdb.set_trace()", "dist.breakpoint(1)", "code.interact(local={'x': x})"], fast={"pdb.set_trace()"}, slow=[]
    ),
)
def test_other_prompts_of_a_rank_have_the_terminal_too(how: str) -> None:
    stop = how if how.startswith("dist") else f"rw.get_rank() == 1 and {how}"
    Path("stops.py").write_text(
        "import code, pdb\nimport torch.distributed as dist\nimport rankwise as rw\n"
        f"with rw.init(timeout=100):\n    x = 41 + rw.get_rank()\n    {stop}\n    print('sum', rw.all_reduce(x))\n"
    )
    prompt, leave = (">>> ", "\x04") if how.startswith("code") else (PROMPT, "c\n")
    shown, status = talk(
        ["rankwise", "launch", "-n", "2", "stops.py"], [(prompt, "print(42 * 1000)\n"), (prompt, leave)]
    )
    assert status == 0, shown
    assert "42000" in shown
    assert shown.count("sum 83") == 2
