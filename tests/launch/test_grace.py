"""Grace periods: ranks that save at Ctrl-C, that do not end after an error, and that start with ignored signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "2"]
SECONDS = 200
# On a host that is busy, rank 0 may take its time as well.
WAITS = r"rankwise: rank(?: |s 0-)1 may take"
# A script that saves a checkpoint at Ctrl-C, in a hundredth of the grace period. Not by print() in the handler, which
# raises an error where the signal interrupts another print().
SAVES = r"""
import os, signal, sys, time
rank = os.environ["RANK"]
def save(*_):
    time.sleep(2.5 if rank == "1" else 0.0)
    os.write(1, b"saved\n")
    sys.exit(0)
signal.signal(signal.SIGINT, save)
print("up", flush=True)
time.sleep(60)
"""
STAYS = """
import atexit, os, threading, time
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 60)
    threading.Timer(60, print).start()
    raise ValueError("the loss is not a number")
time.sleep(60)
"""
STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@contextmanager
def launched(script: str, folder: Path, *flags: str, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    file = folder / "script.py"
    file.write_text(script)
    with subprocess.Popen(
        [*prefix, *LAUNCH, *flags, str(file)],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        try:
            yield launcher
        finally:
            launcher.kill()


def after(code: str) -> tuple[str, ...]:
    """Return the beginning of a command that runs something, and then the rest."""
    return sys.executable, "-c", f"import os, signal, sys\n{code}\nos.execv(sys.argv[1], sys.argv[1:])"


def wait_until_up(launcher: subprocess.Popen[str]) -> None:
    assert launcher.stdout is not None
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]


@pytest.mark.slow
def test_ctrl_c_gives_ranks_a_grace_period_and_names_them(tmp_path: Path) -> None:
    with launched(SAVES, tmp_path, "--grace", "30") as launcher:
        wait_until_up(launcher)
        launcher.send_signal(signal.SIGINT)
        stdout, stderr = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 130
    assert sorted(stdout.splitlines()) == ["[0] saved", "[1] saved"]
    assert re.fullmatch(f"{WAITS} 30 s to end; Ctrl-C ends them now\n", stderr)


@pytest.mark.slow
def test_another_ctrl_c_ends_ranks_at_once(tmp_path: Path) -> None:
    with launched(SAVES.replace("2.5", "60"), tmp_path, "--grace", "55") as launcher:
        wait_until_up(launcher)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr is not None
        assert re.fullmatch(f"{WAITS} 55 s to end; Ctrl-C ends them now\n", launcher.stderr.readline())
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr.read() == ""
        assert launcher.wait(SECONDS) == 130


@pytest.mark.rare
def test_ctrl_c_reaches_the_children_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVES.replace("2.5", "0.0"))
    shell = ["--no-python", "sh", "-c", '"$0" "$1"; true', sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen([*LAUNCH, *shell], env=clean_environ(), stdout=subprocess.PIPE, text=True) as launcher:
        wait_until_up(launcher)
        launcher.send_signal(signal.SIGINT)
        assert sorted(launcher.communicate(timeout=SECONDS)[0].splitlines()) == ["[0] saved", "[1] saved"]
    assert launcher.returncode == 130


@pytest.mark.slow
def test_an_error_at_ctrl_c_is_reported(tmp_path: Path) -> None:
    script = SAVES.replace('    os.write(1, b"saved\\n")\n', "    raise OSError('disk full')\n").replace("2.5", "0.5")
    with launched(script, tmp_path) as launcher:
        wait_until_up(launcher)
        launcher.send_signal(signal.SIGINT)
        _, stderr = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 130
    assert re.search(
        r"^rankwise: rank [01] of 2 on .*\n(.*\n)+OSError: disk full\n\nrank [01] then raised the same OSError",
        stderr,
        re.MULTILINE,
    )


@pytest.mark.slow
def test_a_rank_that_failed_and_does_not_end_is_a_failure_after_a_while(tmp_path: Path) -> None:
    with launched(STAYS, tmp_path, "--grace", "0.5") as launcher:
        _, stderr = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 1
    assert stderr.startswith("rankwise: rank 1 of 2 on")
    assert "ValueError: the loss is not a number\n\nrank 0 then was stopped (SIGTERM)\nrank 1 did not end" in stderr


@pytest.mark.parametrize(("number", "status"), variants(STOPS, slow=STOPS[:1]))
def test_an_earlier_error_of_a_rank_is_reported_when_the_launcher_is_stopped(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    # A rank sends its error before it waits for its threads.
    script = STAYS.replace("threading.Timer(60, print)", "threading.Timer(0.5, os.write, [1, b'up\\n'])")
    with launched(script, tmp_path, "--grace", "50") as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "[1] up\n"
        launcher.send_signal(number)
        assert launcher.stderr is not None
        first = launcher.stderr.readline()
        if re.match(WAITS, first):
            launcher.send_signal(signal.SIGINT)
        stderr = first + launcher.stderr.read()
        assert launcher.wait(SECONDS) in {status, 130}
    assert "rankwise: rank 1 of 2 on" in stderr
    assert "ValueError: the loss is not a number" in stderr


@pytest.mark.rare
def test_a_blocked_sigchld_does_no_harm_and_ranks_have_it_as_it_was(tmp_path: Path) -> None:
    blocked = after("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})")
    script = "import signal\nprint(signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
    with launched(script, tmp_path, prefix=blocked) as launcher:
        assert launcher.communicate(timeout=SECONDS)[1] == ""
    assert launcher.returncode == 0


@pytest.mark.slow
def test_a_signal_ignored_at_the_start_is_ignored_by_launcher_and_ranks_but_for_stacks(
    tmp_path: Path,
) -> None:
    ignoring = after(
        "for name in ('SIGHUP', 'SIGINT', 'SIGQUIT', 'SIGCHLD'):\n"
        "    signal.signal(getattr(signal, name), signal.SIG_IGN)"
    )
    script = (
        "import os, signal\n"
        "names = ('SIGHUP', 'SIGINT', 'SIGQUIT', 'SIGCHLD')\n"
        "print([signal.getsignal(getattr(signal, name)) == signal.SIG_IGN for name in names], flush=True)\n"
        f"open({str(tmp_path / 'go')!r} + os.environ['RANK']).read()\n"
    )
    for rank in range(2):
        os.mkfifo(tmp_path / f"go{rank}")
    with launched(script, tmp_path, prefix=ignoring) as launcher:
        assert launcher.stdout is not None
        lines = sorted(launcher.stdout.readline() for _ in range(2))
        assert lines == [f"[{rank}] [True, True, True, True]\n" for rank in range(2)]
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            launcher.send_signal(number)
        assert launcher.stderr is not None
        # A script's shell ignores it for what it starts with `&`.
        assert launcher.stderr.readline().startswith("rankwise: stacks of ranks 0-1 on ")
        for rank in range(2):
            (tmp_path / f"go{rank}").open("w").close()
        assert launcher.communicate(timeout=SECONDS)[0] == ""
    assert launcher.returncode == 0


@pytest.mark.slow
def test_a_program_starts_with_signals_as_a_shell_starts_it() -> None:
    ended = subprocess.run(
        [*LAUNCH, "--no-python", "bash", "-c", "yes | head -1; trap '' PIPE; grep SigIgn /proc/self/status"],
        env=clean_environ(), capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    ignored = 1 << (signal.SIGPIPE - 1)
    # The C library's own two, 32 and 33, are ignored in what `posix_spawn` starts: `subprocess` uses it since 3.13.
    internal = 0b11 << 31
    mine = int(Path("/proc/self/status").read_text().split("SigIgn:")[1].split()[0], 16)
    expected = (mine & ~(1 << (signal.SIGXFSZ - 1)) | ignored) & ~internal
    lines = ended.stdout.splitlines()
    found = sorted((line[:3], int(line.split()[-1], 16) & ~internal) for line in lines if "SigIgn:" in line)
    assert found == [("[0]", expected), ("[1]", expected)]
    assert sorted(line for line in lines if "SigIgn:" not in line) == ["[0] y", "[1] y"]
