"""Many launches of a function: beside each other on this host, with results in order, and the failure of one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._launch import many, spec
from rankwise.errors import InvalidArgumentError, LaunchError, RankFailedError
from rankwise.launching import launch_many
from tests.launch.test_engines import ThisHost, end
from tests.launch.test_output import on_terminal


def meet(folder: str, name: str, *others: str) -> str:
    """Return once the launches of other names run too."""
    rank = rw.get_rank()
    Path(folder, f"{name}-{rank}").touch()
    while not all(Path(folder, f"{other}-{rank}").exists() for other in others):
        time.sleep(0.01)
    sys.stdout.write("met\n")
    return name


def end_as(how: str) -> str:
    """Raise, wait for good, or return."""
    if how == "wait":
        threading.Event().wait()
    if how == "raise" and rw.get_rank() == 1:
        raise ValueError("this one fails")
    return how


def test_results_are_in_order_and_launches_overlap(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    arguments = {"a": (folder, "a", "b"), "b": (folder, "b", "a"), "c": (folder, "c")}
    assert launch_many(meet, arguments, nproc=2, parallel=2) == [["a", "a"], ["b", "b"], ["c", "c"]]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"[{name}: {rank}] met" for name in "abc" for rank in (0, 1)]


def test_the_others_go_on_after_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    failed, result = launch_many(end_as, [("raise",), ("return",)], nproc=2, failures="return")
    assert result == ["return", "return"]
    assert isinstance(failed, RankFailedError)
    assert str(failed).startswith("run 0: rank 1 of 2 on ")
    assert "rankwise: run 0: rank 1 of 2 on " in capfd.readouterr().err
    with pytest.raises(RankFailedError, match=r"^only: rank 1 of 2 on .* raised ValueError: this one fails"):
        launch_many(end_as, {"only": ("raise",)}, nproc=2)


@pytest.mark.slow
def test_a_failure_stops_the_others_if_asked() -> None:
    with pytest.raises(RankFailedError, match=r"^run 1: rank 1 of 2 on "):
        launch_many(end_as, [("wait",), ("raise",), ("wait",), ("wait",)], nproc=2, parallel=2, failures="stop")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rankwise-launch")]


def test_an_engine_returns_failures_too() -> None:
    first, second = launch_many(end, [("raise",), ("not",)], nproc=1, on=ThisHost(), failures="return")
    assert (first, second) == ([None], [None])
    first, second = launch_many(end, [("raise",), ("kill",)], nproc=2, on=ThisHost(), failures="return")
    assert all(isinstance(each, LaunchError) for each in (first, second))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([(1,)], {"parallel": 0}, "parallel=0 is not"),
        ([(1,)], {"failures": "ignore"}, "failures='ignore' is not one of 'raise', 'stop', 'return'"),
        ([(1,)], {"parallel": 2, "on": "slurm"}, "parallel= and on= exclude each other"),
        ([(1,)], {"nnodes": 2}, "nnodes=2 needs on="),
        ([(1,), 2], {}, r"the arguments of a launch are a tuple, got 2"),
        ([(threading.Lock(),)], {}, "lock"),
    ],
)
def test_what_cannot_be_is_refused_before_a_launch(
    arguments: list[object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        launch_many(end_as, arguments, nproc=1, **options)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="end_as"):
        launch_many(end_as, [("return",), ()], nproc=1)


def test_launches_share_cores_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(spec, "_cores", lambda: 16)
    monkeypatch.setattr(many, "num_accelerators", lambda: 4)
    assert [many._variables(place, 3, 2) for place in range(3)] == [
        {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": devices} for devices in ("0,1", "2,3", "0,1")
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert many._variables(1, 2, 1) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert many._variables(1, 2, 2) == {}  # there are not enough for a choice
    assert many._variables(0, 1, 1) == {}


PROGRAM = """
import signal, threading
from rankwise.launching import launch_many

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests in the background

def wait(number):
    print("runs", flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    launch_many(wait, [(0,), (1,), (2,)], nproc=2, parallel=2)
"""


@pytest.mark.slow
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        assert program.stdout is not None
        seen = [program.stdout.readline() for _ in range(4)]
        assert sorted(seen) == [f"[run {run}: {rank}] runs\n" for run in (0, 1) for rank in (0, 1)]
        os.kill(program.pid, signal.SIGINT)
        rest = program.stdout.read()
    assert program.returncode == -signal.SIGINT
    assert "run 2" not in rest
    assert rest.endswith("KeyboardInterrupt\n")


FAST = """
import rankwise as rw
from rankwise.launching import launch_many

if __name__ == "__main__":
    launch_many(rw.get_rank, [(), (), ()], nproc=2, parallel=2)
    print("the end")
"""


@pytest.mark.slow
def test_a_terminal_shows_how_many_have_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAST)
    text, status = on_terminal([sys.executable, "program.py"], tmp_path)
    assert status == 0
    assert re.search(r"\x1b\[2Krankwise: \|#{20}\| 3 of 3 launches have ended, \d+ s\r\nthe end\r\n$", text), repr(text)
