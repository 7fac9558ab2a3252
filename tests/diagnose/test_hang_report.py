"""The report of a hang, which one process of each host prints: the rank that is missing, and where all are."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import rankwise as rw
from rankwise._diagnose.report_file import write_report
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError
from tests.lanes import variants

PROGRAM = Path(__file__).parent / "programs" / "hangs.py"
LAUNCHERS = {
    "rankwise": (sys.executable, "-m", "rankwise", "launch", "-n", "3"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
    "mpiexec": (str(Path(sys.executable).parent / "mpiexec.hydra"), "-n", "3", sys.executable),
}
PLACES = {"sleeps": 27, "stopped": 21, "lock": 26}


@contextlib.contextmanager
def hanging(launcher: str, victim: int, how: str, collective: str, seconds: float = 2) -> Iterator[tuple[str, Path]]:
    """Start a job that hangs, and return the lines of its first report, and the folder of the reports."""
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        [*LAUNCHERS[launcher], str(PROGRAM), str(victim), how, collective, str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANKWISE_HANG_DIR": f"{folder}/reports", "TMPDIR": folder},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while "this report is in" not in (line := process.stdout.readline()):
                assert line, "".join(lines)
                lines.append(line)
            yield "".join(lines), Path(folder) / "reports"
        finally:
            started = psutil.Process(process.pid).children(recursive=True)
            for child in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            psutil.wait_procs(started, timeout=60)


CASES = [
    ("rankwise", "lock", "rankwise"),
    ("rankwise", "stopped", "torch"),
    ("torchrun", "sleeps", "ddp"),
    ("torchrun", "sleeps", "polls"),
    ("mpiexec", "lock", "torch"),
    ("torchrun", "skips", "torch"),
    ("torchrun", "stopped", "spins"),
]


WITHOUT_PY_SPY = [("sleeps", "rankwise"), ("stopped", "torch.distributed.run")]


def without_py_spy(folder: Path) -> dict[str, str]:
    """Return the environment of programs that find this interpreter's packages, but no py-spy."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    packages = [sysconfig.get_path("purelib"), str(Path(rw.__file__).parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(packages), "PATH": f"{python.parent}:/usr/bin:/bin"}


@pytest.mark.parametrize(("how", "launcher"), variants(WITHOUT_PY_SPY, slow=WITHOUT_PY_SPY[:1]))
def test_a_hang_is_reported_without_py_spy(how: str, launcher: str, tmp_path: Path) -> None:
    """The ranks write their stacks themselves, and that they run for this moves none of them."""
    reports = str(tmp_path / "reports")
    environ = without_py_spy(tmp_path) | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "RANKWISE_HANG_DIR": reports}
    command = ["rankwise", "launch", "-n"] if launcher == "rankwise" else [launcher, "--standalone", "--nproc-per-node"]
    with subprocess.Popen(
        [tmp_path / "bin" / "python", "-m", *command, "2", str(PROGRAM), "1", how, "rankwise", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines: list[str] = []
        while "this report is in" not in (line := process.stdout.readline()):
            assert line, "".join(lines)
            lines.append(line)
        started = psutil.Process(process.pid).children(recursive=True)
        for each in [*started, psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    report = "".join(lines)
    assert "missing: rank 1, not moving: " in report
    assert "rank 0: waiting for " in report
    assert f"hangs.py:{PLACES['sleeps']}" in report or how == "stopped"


@pytest.mark.parametrize(("launcher", "how", "collective"), variants(CASES, fast=CASES[:1], slow=CASES[1:4]))
def test_a_hang_is_reported_with_the_rank_that_is_missing(launcher: str, how: str, collective: str) -> None:
    with hanging(launcher, 1, how, collective) as (report, folder):
        (file,) = folder.iterdir()
        written = file.read_text()
    assert re.fullmatch(r"hang-.*-rank0-\d+T\d+-[0-9a-f]{8}\.txt", file.name)
    missing = [line for line in report.splitlines() if "missing:" in line]
    assert len(missing) == 1, report
    assert "missing: rank 1, not moving: " in missing[0]
    assert "ranks 0, 2: waiting for " in report
    for line in written.splitlines():
        assert line in report
    if collective in {"torch", "ddp", "polls"} and how != "lock":
        absent = "rank 1 did not answer" if how == "stopped" else "rank 1 has not come"
        called = rf"collective \d of process group 0 \(gloo\): all_?reduce of ranks 0, 2; {absent}"
        assert re.search(called, report), report
    if how in PLACES:
        assert f"hangs.py:{PLACES[how]}" in missing[0]


@pytest.mark.soak(20)
@pytest.mark.rare
def test_a_rank_that_hangs_at_random_is_named(seed: int, record_property: Callable[[str, object], None]) -> None:
    choice = random.Random(seed)  # noqa: S311 - not for secrets
    launcher, victim = choice.choice(["rankwise", "torchrun"]), choice.randrange(3)
    how, collective = choice.choice(["sleeps", "stopped", "lock", "skips"]), choice.choice(["rankwise", "torch", "ddp"])
    start = time.monotonic()
    with hanging(launcher, victim, how, collective) as (report, _):
        record_property("seconds", f"{time.monotonic() - start:.1f} from the start, {how} {collective} {launcher}")
        assert re.findall(r"missing: (.*?),", report) == [f"rank {victim}"], report


def test_no_report_without_a_hang_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWISE_HANG_SECONDS", "20")
    before = psutil.Process().children()
    with rw.init(device="cpu"):  # alone: nothing to watch
        assert psutil.Process().children() == before
    for value in ("soon", "-1", "nan"):
        monkeypatch.setenv("RANKWISE_HANG_SECONDS", value)
        with pytest.raises(
            LauncherEnvironmentError, match=f"RANKWISE_HANG_SECONDS='{value}' is not a number of seconds"
        ):
            rw.init(device="cpu")
    with pytest.raises(InvalidArgumentError, match="hang_report=-1"):
        rw.init(device="cpu", hang_report=-1)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_the_watch_ends_with_the_session(session: object) -> None:
    rw.finalize()
    before = set(psutil.Process().children())
    with rw.init(device="cpu", hang_report=20) as joined:
        # Not by its command line, which /proc does not show for a moment after it was started.
        started = set(psutil.Process().children()) - before
        assert len(started) == (1 if joined.rank == 0 else 0)
        rw.barrier()
    assert set(psutil.Process().children()) == before


def test_reports_do_not_follow_links_or_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise._diagnose.report_file.time.strftime", lambda _: "now")
    first, second = (write_report(str(tmp_path), text, 0) for text in ("one", "two"))
    assert first != second
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["one\n", "two\n"]
    monkeypatch.setattr("rankwise._diagnose.report_file.secrets.token_hex", lambda _: "known")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / f"hang-{socket.gethostname()}-rank0-now-known.txt").symlink_to(tmp_path / "precious")
    assert "could not be written" in write_report(str(tmp_path), "three", 0)
    assert (tmp_path / "precious").read_text() == "precious"
