"""Signals to the launcher, which reach the ranks as a user of a scheduler or of a shell expects."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rankwise._launch.forwarded_signals import forwarded_signals
from tests.session.worlds import clean_environ

RANKWISE = str(Path(sys.executable).with_name("rankwise"))
PROGRAM = str(Path(__file__).parent / "programs" / "print_signals.py")
LAUNCH = [RANKWISE, "launch", "-n", "2", "--grace", "120", PROGRAM]
SECONDS = 200


@contextmanager
def launched(*prefix: str, launch: list[str] = LAUNCH, stdin: str = "batch\n") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*prefix, *launch], env=clean_environ(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as launcher:  # fmt: skip
        try:
            assert launcher.stdin is not None
            launcher.stdin.write(stdin)
            launcher.stdin.close()
            assert lines(launcher) == [f"[0] read {stdin!r}", "[1] read ''"]
            yield launcher
        finally:
            launcher.kill()


def lines(launcher: subprocess.Popen[str], count: int = 2) -> list[str]:
    assert launcher.stdout is not None
    return sorted(launcher.stdout.readline().rstrip("\n") for _ in range(count))


def wait_until_stopped(process: psutil.Process) -> None:
    deadline = time.monotonic() + SECONDS
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_signals_reach_all_ranks_and_standard_input_rank_zero() -> None:
    with launched() as launcher:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            launcher.send_signal(number)
            assert lines(launcher) == [f"[0] {number.name}", f"[1] {number.name}"]
        launcher.send_signal(signal.SIGTSTP)
        process = psutil.Process(launcher.pid)
        ranks = [each for each in process.children(recursive=True) if "[rank" in " ".join(each.cmdline())]
        for each in (process, *ranks):
            wait_until_stopped(each)
        launcher.send_signal(signal.SIGCONT)
        assert lines(launcher) == ["[0] SIGCONT", "[1] SIGCONT"]
        launcher.send_signal(signal.SIGTERM)
        assert lines(launcher) == ["[0] SIGTERM", "[1] SIGTERM"]
        assert launcher.wait(SECONDS) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_signal_to_all_processes_lets_ranks_end_by_themselves(tmp_path: Path) -> None:
    """As Slurm sends it: also to the process that ranks are forked from, whose end would be theirs."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(1)\n    os.write(1, b'saved\\n')\n    os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print(f'read {sys.stdin.read()!r}', flush=True)\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    with launched(launch=[*LAUNCH[:-1], str(script)]) as launcher:
        process = psutil.Process(launcher.pid)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for each in (*process.children(recursive=True), process):
                each.send_signal(number)
        assert launcher.stdout is not None
        output = launcher.stdout.read()
        assert output.count("] saved") == 2, output
        assert launcher.wait(SECONDS) == 128 + signal.SIGTERM


def test_signals_that_come_while_one_is_forwarded_are_forwarded_after_it() -> None:
    events: list[str] = []

    class Ranks:
        def signal_all(self, signum: signal.Signals) -> None:
            events.append(f"{signum.name} begins")
            if len(events) == 1:
                for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
                    os.kill(os.getpid(), number)
            events.append(f"{signum.name} ends")

        def suspend(self) -> None: ...

        def resume(self) -> None:
            events.append("SIGCONT")

        def request_stacks(self) -> None: ...

    with forwarded_signals(Ranks(), stopping=()):
        os.kill(os.getpid(), signal.SIGUSR1)
    one, two = ["SIGUSR1 begins", "SIGUSR1 ends"], ["SIGUSR2 begins", "SIGUSR2 ends"]
    assert events == [*one, *two, *one, "SIGCONT"]


@pytest.mark.slow
def test_many_signals_while_the_fork_server_is_busy_do_not_end_the_launcher() -> None:
    with launched() as launcher:
        (server,) = psutil.Process(launcher.pid).children()
        server.suspend()
        for number in [signal.SIGUSR1, signal.SIGUSR2] * 4000:
            launcher.send_signal(number)
            time.sleep(0.0003)  # each has a handler of its own
        server.resume()
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stdout is not None
        received = {f"[{rank}] {name}\n" for rank in range(2) for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
        assert set(launcher.stdout) == received
        assert launcher.wait(SECONDS) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_rank_that_does_not_handle_a_signal_fails_by_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import sys, time\nprint(f"read {sys.stdin.read()!r}", flush=True)\ntime.sleep(60)\n')
    with launched(launch=[*LAUNCH[:-1], str(script)]) as launcher:
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.stdout is not None
        assert "SIGUSR1" in launcher.stdout.read()
        assert launcher.wait(SECONDS) == 128 + signal.SIGUSR1


@pytest.mark.slow
def test_nohup_ignores_a_hangup_and_setsid_changes_nothing() -> None:
    with launched("nohup", "setsid") as launcher:
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGUSR1)
        assert lines(launcher) == ["[0] SIGUSR1", "[1] SIGUSR1"]
        launcher.send_signal(signal.SIGTERM)
        assert lines(launcher) == ["[0] SIGTERM", "[1] SIGTERM"]
        assert launcher.wait(SECONDS) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_closed_terminal_ends_the_ranks(tmp_path: Path) -> None:
    script, saved = tmp_path / "script.py", tmp_path / "saved"
    script.write_text(f"""
import os, signal, sys, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: (open({str(saved)!r} + rank, "w").close(), sys.exit(0)))
print("up", flush=True)
time.sleep(100)
""")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(RANKWISE, [*LAUNCH[:-1], str(script)], clean_environ())  # noqa: S606 - the command
    shown = b""
    while shown.count(b"] up") + shown.count(b"\x1b[0mup") < 2:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
