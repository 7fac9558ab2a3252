"""Output of the launcher that nobody reads, or that cannot be written: only ranks wait, as they would alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rankwise._launch.output.stream_writer import StreamWriter
from tests.lanes import variants
from tests.session.worlds import clean_environ

FILL = str(Path(__file__).parent / "programs" / "fill.py")
LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch"]
SECONDS = 200
# More than all pipes and the launcher hold together.
LINES = 5000


@pytest.fixture
def screen() -> Iterator[tuple[int, int]]:
    """A pipe that nobody reads yet: its readable end, and its writable end."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


@contextmanager
def launched(*args: str, screen: int) -> Iterator[subprocess.Popen[str]]:
    launcher = subprocess.Popen([*LAUNCH, *args], env=clean_environ(), stdout=screen, stderr=subprocess.PIPE, text=True)
    os.close(screen)
    with launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


SIGNALS = [([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130)]


def wait_until_ranks_wait(launcher: subprocess.Popen[str], nproc: int = 2) -> None:
    assert launcher.stderr is not None
    lines = sorted(launcher.stderr.readline() for _ in range(nproc))
    assert lines == [f"[{rank}] waits True\n" for rank in range(nproc)]


@pytest.mark.parametrize("blocking", variants([True, False], slow=[True]))
def test_ranks_wait_for_a_reader_and_nothing_is_lost(blocking: bool, screen: tuple[int, int]) -> None:
    reader, writer = screen
    os.set_blocking(writer, blocking)
    with launched("-n", "2", FILL, str(LINES), screen=writer) as launcher:
        wait_until_ranks_wait(launcher)
        with os.fdopen(os.dup(reader), "rb") as file:
            lines = file.read().splitlines()
        assert launcher.wait(SECONDS) == 0
    assert sorted(lines) == sorted(f"[{rank}] {str(rank) * 999}".encode() for rank in range(2) for _ in range(LINES))


@pytest.mark.slow
def test_a_killed_rank_is_noticed_while_nobody_reads_the_output(screen: tuple[int, int]) -> None:
    reader, writer = screen
    with launched("-n", "2", FILL, str(LINES), screen=writer) as launcher:
        assert launcher.stderr is not None
        wait_until_ranks_wait(launcher)
        (server,) = psutil.Process(launcher.pid).children()
        server.children()[1].kill()
        assert "rankwise: rank 1 of 2 on" in launcher.stderr.readline()
        with os.fdopen(os.dup(reader), "rb") as file:
            shown = file.read()
        assert launcher.wait(SECONDS) == 137
    assert shown.count(b"\n") > 1000, "what was printed before is shown still"


@pytest.mark.parametrize(("signals", "status"), variants(SIGNALS, slow=SIGNALS[:1]))
def test_the_launcher_ends_at_a_signal_though_nobody_reads(
    signals: list[int], status: int, screen: tuple[int, int]
) -> None:
    writer = screen[1]
    with launched("-n", "2", FILL, str(LINES), screen=writer) as launcher:
        wait_until_ranks_wait(launcher)
        for number in signals:
            launcher.send_signal(number)
        _, stderr = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == status
    assert "rankwise: nobody read standard output for 2 s: the last" in stderr
    assert "bytes for it are discarded" in stderr


@pytest.mark.slow
def test_output_that_cannot_be_written_is_a_failure() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        ended = subprocess.run(
            [*LAUNCH, "-n", "2", "--no-python", "echo", "x"],
            env=clean_environ(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    wanted = "rankwise: standard output could not be written: No space left on device; "
    assert ended.stderr == wanted + "what ranks printed from then on is lost\n"


@pytest.mark.parametrize("command", variants(["command", "function"], slow=["command"]))
def test_closed_streams_show_nothing_and_do_no_harm(command: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "def write(path):\n"
        "    print('x')\n"
        "    sys.stderr.write('y')\n"
        "    os.write(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), b'z')\n"
        "if len(sys.argv) > 2:\n"
        "    import rankwise\n"
        "    rankwise.launch(write, sys.argv[1], nproc=2)\n"
        "else:\n"
        "    write(sys.argv[1])\n"
    )
    line = {
        "command": [*LAUNCH, "-n", "2", str(script), str(file)],
        "function": [sys.executable, str(script), str(file), "launch"],
    }[command]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *line], env=clean_environ(), timeout=SECONDS, check=False
    )
    assert ended.returncode == 0
    assert file.read_text() == "zz"


def test_a_writer_reports_discarded_bytes_and_writes_nothing_after_that(screen: tuple[int, int]) -> None:
    reader, descriptor = screen
    writer = StreamWriter(descriptor, "the screen", on_writable=lambda: None)
    assert writer.drain(60.0) == ""
    assert writer.write(b"x" * (1 << 21))
    assert writer.is_full
    lost = writer.drain(0.2)
    held = 1 << 16  # the capacity of a pipe
    assert lost == f"nobody read the screen for 0.2 s: the last {(1 << 21) - held} bytes for it are discarded"
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "rankwise-writer")
    read = 0
    while thread.is_alive():
        read += len(os.read(reader, 1 << 16))
        thread.join(0.05)
    os.close(descriptor)
    while piece := os.read(reader, 1 << 16):
        read += len(piece)
    assert held <= read <= held + 4096, "no more than what was being written"


def test_a_writer_whose_reader_leaves_reports_it_and_is_no_longer_full() -> None:
    reader, descriptor = os.pipe()
    writable = threading.Event()
    writer = StreamWriter(descriptor, "the screen", on_writable=writable.set)
    writer.write(b"x" * (1 << 21))
    os.close(reader)
    assert writable.wait(SECONDS)
    assert not writer.is_full
    assert not writer.write(b"y")
    assert writer.drain(0.0) == "the screen could not be written: Broken pipe; what ranks printed from then on is lost"
    os.close(descriptor)
