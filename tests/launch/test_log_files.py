"""Log files of ranks: complete, in torchrun's folders, and with clear errors where they cannot be written."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rankwise as rw
from rankwise.launching import Output
from tests.lanes import variants
from tests.session.worlds import clean_environ

BIN = Path(sys.executable).parent
LAUNCH = [str(BIN / "rankwise"), "launch"]
PROGRAMS = Path(__file__).parent / "programs"


def run(*command: str, preexec_fn: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=clean_environ(), capture_output=True, text=True, timeout=200, check=False, preexec_fn=preexec_fn
    )


def tree(folder: Path) -> dict[str, str]:
    """Return the texts of all files of the only launch in a folder."""
    (launch,) = [path for path in folder.iterdir() if not path.is_symlink()]
    return {str(path.relative_to(launch)): path.read_text() for path in launch.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_each_attempt_and_rank_has_its_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    command = [*LAUNCH, "-n", "2", "--max-restarts", "1", "--log-dir", str(logs), "-r", "0:3,1:1", "-t", "1:2"]
    ended = run(*command, str(PROGRAMS / "log_and_fail.py"), str(tmp_path))
    files = tree(logs)
    assert set(files) == {
        f"attempt_{attempt}/{rank}/{name}.log" for attempt in (0, 1) for rank in (0, 1) for name in ("stdout", "stderr")
    }
    assert files["attempt_1/0/stdout.log"] == "out 0\n"
    assert files["attempt_0/0/stderr.log"] == "err 0\n"
    text = files["attempt_0/1/stderr.log"]
    assert text.startswith("err 1\nTraceback (most recent call last):\n")
    assert text.endswith("ValueError: no data\n")
    assert ended.stdout == "", "standard output is in files only"
    assert "[1] err 1\n" in ended.stderr
    assert "err 0" not in ended.stderr


@pytest.mark.slow
def test_the_folders_are_those_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("print('x')\n")
    found = []
    for launcher in (LAUNCH, [str(BIN / "torchrun")]):
        logs = tmp_path / Path(launcher[0]).name
        run(*launcher, "--standalone", "--nproc-per-node=2", "--log-dir", str(logs), "--redirects=3", str(script))
        found.append(tree(logs))
    assert found[0] == found[1]


@pytest.mark.slow
def test_all_lines_of_all_ranks_arrive_in_order(tmp_path: Path) -> None:
    lines = 100_000
    ended = run(*LAUNCH, "-n", "4", "--log-dir", str(tmp_path), str(PROGRAMS / "many_lines.py"), str(lines))
    assert ended.returncode == 0, ended.stderr
    files = tree(tmp_path)
    seen = ended.stdout.splitlines()
    assert "\x1b" not in ended.stdout + ended.stderr
    for rank in range(4):
        expected = [f"{rank} {number}" for number in range(lines)]
        assert files[f"attempt_0/{rank}/stdout.log"].splitlines() == expected
        assert files[f"attempt_0/{rank}/stderr.log"].splitlines() == expected[::10]
        assert [line[4:] for line in seen if line.startswith(f"[{rank}]")] == expected


@pytest.mark.slow
def test_a_function_writes_log_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("from", rw.get_rank())  # noqa: T201

    rw.launch(talk, nproc=2, output=Output(log_dir=str(tmp_path), redirects=1))
    assert tree(tmp_path) == {f"attempt_0/{rank}/stdout.log": f"from {rank}\n" for rank in (0, 1)}
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("option", variants(["--tee", "--redirects"], slow=["--tee"]))
def test_a_file_that_cannot_grow_is_an_error(option: str, tmp_path: Path) -> None:
    """As on a full disk: the limit of the size of files stands for it."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    # The memory that ranks share is a file too.
    command = [*LAUNCH, "-n", "2", "--no-preload", "--log-dir", str(tmp_path), option, "1"]
    ended = run(*command, str(PROGRAMS / "fill_log.py"), preexec_fn=limit)
    # That of Python, which cannot write at its end what is left in its buffer; into the pipe for --tee it can.
    assert ended.returncode == (120 if option == "--redirects" else 1)
    assert "File too large" in ended.stderr
    if option == "--tee":
        assert ended.stdout.count("\n") == 4000, "the console has all lines"
        assert (
            "stdout.log could not be written: File too large; what ranks printed from then on is lost" in ended.stderr
        )


@pytest.mark.rare
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=8k none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this host permits no mount in a user namespace")
    for option in ("--tee", "--redirects"):
        ended = run(*mount, *LAUNCH, "--log-dir", str(tmp_path), option, "1", str(PROGRAMS / "fill_log.py"))
        assert ended.returncode == (120 if option == "--redirects" else 1)
        assert "No space left on device" in ended.stderr
        assert str(tmp_path) in ended.stderr


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(rw.LaunchError, match=r"log_dir=.* cannot be created or written"):
        rw.launch(os.getpid, nproc=1, output=Output(log_dir=str(tmp_path / name), tee=3))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tee": 4}, "tee=4 is not a choice of streams"),
        ({"redirects": {0: "out"}}, "redirects={0: 'out'} is not a choice"),
        ({"tee": {2: 1}}, "tee names rank 2, and of 2 ranks, which are counted from 0, the last is 1"),
        ({"local_ranks": {5}}, "local_ranks names rank 5"),
        ({"prefix": "host,day"}, "prefix='host,day' is neither a bool nor some of host, time, rank"),
        ({"log_dir": ""}, "log_dir='' is not the name of a folder"),
        ({"log_times": True}, "log_times needs files that the launcher writes"),
        ({"log_times": True, "tee": 2, "redirects": 1}, "log_times needs files that the launcher writes"),
    ],
)
def test_a_wrong_choice_is_an_error(settings: dict[str, object], said: str) -> None:
    with pytest.raises(rw.InvalidArgumentError) as caught:
        rw.launch(os.getpid, nproc=2, output=Output(**settings))  # type: ignore[arg-type]
    assert said in str(caught.value)
