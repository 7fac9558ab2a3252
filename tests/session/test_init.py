"""Joining: with real processes, and every way in which it goes wrong that a person can bring about."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankwise as rw
from rankwise._session.current import opened_session
from rankwise._session.lifecycle import OpenedResources
from rankwise._session.session import state_behind
from rankwise.testing.environments import fake_slurm
from tests.lanes import variants
from tests.session.worlds import PROGRAMS, clean_environ, free_port, plain, run_ranks


def joined(environs: list[dict[str, str]], *args: str) -> list[dict[str, int]]:
    ended = run_ranks("join.py", environs, *args)
    for process in ended:
        assert process.returncode == 0, process.stderr
        assert process.stderr == "", "closing is silent"
    return [json.loads(process.stdout) for process in ended]


def refused(environs: list[dict[str, str]], *args: str) -> list[str]:
    ended = run_ranks("join.py", environs, *args)
    for process in ended:
        assert process.returncode == 1, process.stdout
        assert "Traceback" not in process.stderr
    return [process.stderr for process in ended]


def test_hand_set_variables_join_and_learn_the_rest() -> None:
    port = free_port()
    places = joined([plain(rank, 3, port) for rank in range(3)])
    assert [place["local_rank"] for place in places] == [0, 1, 2]
    for place in places:
        assert (place["local_world_size"], place["num_nodes"], place["total"]) == (3, 1, 3)


def test_ranks_may_be_given_as_arguments() -> None:
    options = {"rank": 0, "world_size": 1, "address": f"localhost:{free_port()}"}
    assert joined([{}], "30", json.dumps(options))[0]["world_size"] == 1


def test_ranks_that_never_arrive_are_named_on_every_rank() -> None:
    port = free_port()
    for error in refused([plain(rank, 5, port) for rank in (0, 2)], "2"):
        assert error.startswith("JoinTimeoutError: ranks 1, 3-4 of 5 did not arrive within 2 s; ranks 0, 2 did")


def test_a_shell_of_srun_that_waits_for_other_tasks_is_named() -> None:
    shell = fake_slurm(2, nodes=1, name="localhost")[0] | {"SLURM_PTY_PORT": "1", "SLURM_STEP_NODELIST": "localhost"}
    (error,) = refused([shell | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}], "1")
    assert "rank 1 of 2 did not arrive" in error
    assert error.endswith("start the program with srun there, or alone with launcher='none'.\n")


def test_a_stranger_on_the_port_is_named_on_every_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        zero, one = refused([plain(rank, 2, port) for rank in range(2)], "2")
    assert "rank zero cannot listen" in zero
    assert f"the listener on port {port} is not rank zero of this world" in one


@pytest.mark.slow
def test_two_jobs_with_one_port_are_told_apart(tmp_path: Path) -> None:
    """The one that comes later would else swap ranks with the first, or meet where that has met."""
    port = free_port()
    ranks = [plain(rank, 2, port, SIGNS=str(tmp_path)) for rank in (0, 1, 0, 1)]
    ended = run_ranks("two_jobs.py", [ranks[0] | {"JOB": "1"}, ranks[1] | {"JOB": "1"}, *ranks[2:]])
    for process in ended[:2]:
        assert (process.returncode, process.stdout) == (0, "2\n"), process.stderr
    assert f"rank zero cannot listen on 127.0.0.1:{port}" in ended[2].stderr
    assert f"the listener on port {port} is not rank zero of this world but another program or job" in ended[3].stderr


def test_a_missing_address_says_what_to_set() -> None:
    (error,) = refused([{"RANK": "0", "WORLD_SIZE": "2"}])
    assert "MASTER_ADDR and MASTER_PORT are not set" in error


def test_a_backend_that_is_not_there_is_told_to_every_rank() -> None:
    port = free_port()
    for error in refused([plain(rank, 2, port, LOCAL_RANK=str(rank)) for rank in range(2)], "5", '{"backend": "nope"}'):
        assert "InvalidArgumentError: backend='nope'" in error
        assert "has" in error


def test_loopback_may_have_another_name_on_each_rank() -> None:
    port = free_port()
    names = ("localhost", "127.0.1.1")
    joined([plain(rank, 2, port, MASTER_ADDR=names[rank]) for rank in range(2)])


def test_a_rank_that_cannot_join_does_not_strand_the_others() -> None:
    port = free_port()
    zero, one = run_ranks("join_badly.py", [plain(rank, 2, port) for rank in range(2)], "100")
    assert "rank 1 on" in zero.stderr
    assert "'warp'" in zero.stderr
    assert "InvalidArgumentError" in one.stderr


def test_a_rank_that_fails_with_an_error_of_others_while_joining_says_so() -> None:
    port = free_port()
    zero, one = run_ranks("join_badly.py", [plain(rank, 2, port) for rank in range(2)], "280", "memory", seconds=200)
    assert "MemoryError: no room" in zero.stderr
    assert "JoinError: rank 1 on" in zero.stderr
    assert one.stderr == "MemoryError: no room\n"


def test_a_member_that_made_a_group_and_ended_does_not_break_it_for_others() -> None:
    port = free_port()
    for rank, process in enumerate(run_ranks("end_early.py", [plain(rank, 3, port) for rank in range(3)])):
        assert (process.returncode, process.stdout) == (0, f"made by {rank}\n"), process.stderr


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_a_rank_that_dies_is_an_error_on_the_others_at_once(end: str) -> None:
    port = free_port()
    ended = run_ranks("die.py", [plain(rank, 3, port) for rank in range(3)], end, "280", seconds=200)
    for rank in (0, 2):
        assert ended[rank].returncode == 1
        assert "CollectiveError: all_reduce at die.py:21 failed: rank 1 " in ended[rank].stderr
        assert ("SystemExit: 3 (die.py:18)" if end == "raise" else "its connection closed") in ended[rank].stderr


@pytest.mark.slow
def test_a_program_that_just_ends_is_silent() -> None:
    port = free_port()
    for process in run_ranks("leave.py", [plain(rank, 3, port) for rank in range(3)], fresh=True):
        assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize(
    ("how", "launcher"),
    variants(
        [
            ("again", "by hand"),
            ("keeps DDP", "by hand"),
            ("one alone first", "by hand"),
            ("one comes late", "by hand"),
            ("one comes late", "rankwise"),
        ],
        fast=[("again", "by hand")],
        slow=[("keeps DDP", "by hand"), ("one comes late", "by hand")],
    ),
)
def test_a_process_may_join_again(how: str, launcher: str, tmp_path: Path) -> None:
    folder = {"TMPDIR": str(tmp_path)}  # torch leaves a folder
    if launcher == "by hand":
        port = free_port()
        ended = run_ranks("rejoin.py", [plain(rank, 2, port, **folder) for rank in range(2)], how)
        assert [(process.returncode, process.stdout) for process in ended] == [(0, "ok\n")] * 2, ended[0].stderr
    else:
        rankwise = str(Path(sys.executable).with_name("rankwise"))
        command = [rankwise, "launch", "-n", "2", "--no-prefix", str(PROGRAMS / "rejoin.py"), how]
        launched = subprocess.run(
            command, env=clean_environ(**folder), capture_output=True, text=True, timeout=200, check=False
        )
        assert (launched.returncode, launched.stdout) == (0, "ok\nok\n"), launched.stderr


@pytest.mark.parametrize(("how", "status"), variants([("raise", 1), ("exit", 3), ("gone", 0)], slow=[("raise", 1)]))
def test_a_rank_zero_that_ends_early_holds_nobody_up(how: str, status: int) -> None:
    """The timeout is 280 s, and the ranks are given 200."""
    port = free_port()
    zero, one = run_ranks("end.py", [plain(rank, 2, port) for rank in range(2)], how, seconds=200, fresh=True)
    assert zero.returncode == status
    assert one.returncode == (0 if how == "gone" else 1)
    if how != "gone":
        assert "CollectiveError: barrier at end.py:20 failed: rank 0 left the session" in one.stderr


def test_rank_zero_says_whom_it_waits_for_at_the_end() -> None:
    port = free_port()
    zero, one, two = run_ranks("linger.py", [plain(rank, 3, port) for rank in range(3)])
    assert re.fullmatch(r"rank 0 waits up to 100 s until ranks? 1(-2)? leave\(s\)\n", zero.stderr), "rank 2 may be slow"
    assert one.stderr == two.stderr == ""


def test_a_world_of_one_host_listens_on_loopback_only() -> None:
    """Rule 9."""
    port = free_port()
    for process in run_ranks("listeners.py", [plain(rank, 2, port) for rank in range(2)]):
        assert process.returncode == 0, process.stderr
        assert set(process.stdout.split()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert process.stdout.strip()


@pytest.mark.slow
def test_ddp_works_alone_and_with_many(tmp_path: Path) -> None:
    port, folder = free_port(), {"TMPDIR": str(tmp_path)}  # torch leaves a folder
    for environs in ([folder], [plain(rank, 2, port, **folder) for rank in range(2)]):
        for process in run_ranks("ddp.py", environs):
            assert (process.returncode, process.stdout) == (0, "synced\n"), process.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_a_closed_session_lets_go_of_its_groups(tmp_path: Path) -> None:
    """Threads that are left when the interpreter ends take the process down, now and then, with SIGABRT."""
    port, folder = free_port(), {"TMPDIR": str(tmp_path)}  # torch leaves a folder
    for process in run_ranks("let_go.py", [plain(rank, 2, port, **folder) for rank in range(2)], fresh=True):
        assert (process.returncode, process.stdout) == (0, "[]\n"), process.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what threads are at from /proc")
def test_a_closed_session_waits_for_threads_of_a_group_that_a_model_holds(tmp_path: Path) -> None:
    """A thread that gives back Python's objects while the model goes, or the interpreter, hangs or dies of SIGSEGV."""
    port, folder = free_port(), {"TMPDIR": str(tmp_path)}  # torch leaves a folder
    for process in run_ranks("late_thread.py", [plain(rank, 2, port, **folder) for rank in range(2)], fresh=True):
        assert (process.returncode, process.stdout) == (0, "synced\n"), process.stderr


def test_alone_there_is_a_group_of_one() -> None:
    with rw.init() as session:
        assert (session.rank, session.world_size, dist.get_world_size()) == (0, 1, 1)
        assert rw.all_reduce(2) == 2
    assert not dist.is_initialized()


def test_nothing_is_changed_that_nobody_asked_for() -> None:
    """Rule 6: not the environment, not the random state, not the hook; the leak police looks at the rest."""
    before = dict(os.environ), torch.random.get_rng_state(), sys.excepthook
    with rw.init():
        assert dict(os.environ) == before[0]
        rw.all_gather(torch.ones(2))
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert sys.excepthook is before[2]


def test_sessions_nest_and_the_outer_one_stays_open() -> None:
    with rw.init() as outer:
        with rw.init() as inner:
            assert state_behind(inner).comm is state_behind(outer).comm
        assert dist.is_initialized()
        assert opened_session() is state_behind(outer)
        with pytest.raises(rw.InvalidArgumentError, match="finalize"):
            rw.init(backend="nccl")
    assert opened_session() is None


def test_finalize_closes_and_may_be_called_at_any_time() -> None:
    rw.finalize()
    rw.init()
    rw.finalize()
    assert not dist.is_initialized()
    rw.finalize()
    with rw.init() as session:
        rw.finalize()
        assert opened_session() is None
    session.close()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10"])
def test_a_timeout_must_be_seconds(timeout: float) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="timeout="):
        rw.init(timeout=timeout)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 1}, "world_size is not given"),
        ({"world_size": 2}, "rank is not given"),
        ({"rank": 2, "world_size": 2, "address": "localhost:1"}, "rank 2"),
        ({"rank": -1, "world_size": 2, "address": "localhost:1"}, "rank -1"),
        ({"rank": 0, "world_size": 2, "address": "localhost"}, "address='localhost'"),
        ({"rank": 0, "world_size": 2, "address": "localhost:0"}, "address='localhost:0'"),
        ({"backend": "nope"}, "backend='nope'"),
        ({"device": "warp"}, "device='warp'"),
        ({"launcher": "slrum"}, "did you mean 'slurm'"),
        ({"launcher": None}, "launcher=None"),
        ({"device": "cuda:0"}, "device='cuda:0' is not on this host"),
        ({"backend": "cuda:gloo"}, "has none for this rank's device, cpu"),
        ({"backend": 5}, "backend=5"),
        ({"rank": "0", "world_size": 1}, "rank='0', of type str, is not an integer"),
        ({"rank": 0.0, "world_size": 1}, "rank=0.0, of type float, is not an integer"),
        ({"timeout": 1e300}, "timeout=1e"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(rw.RankwiseError, match=named):
        rw.init(**options)  # type: ignore[arg-type]  # that is the point
    assert not dist.is_initialized()


@pytest.mark.parametrize("is_failing", [True, False])
def test_an_error_of_a_data_worker_does_not_interrupt_the_closing(
    monkeypatch: pytest.MonkeyPatch, *, is_failing: bool
) -> None:
    """torch's handler raises when a worker was killed; it comes last, and not in place of the program's own error."""

    def worker_is_gone(*_: object) -> None:
        raise RuntimeError("a worker was killed")

    def close(self: OpenedResources, reason: str, failed: bool) -> None:
        os.kill(os.getpid(), signal.SIGCHLD)
        real_close(self, reason, failed)

    real_close = OpenedResources.close
    monkeypatch.setattr(OpenedResources, "close", close)
    before = signal.signal(signal.SIGCHLD, worker_is_gone)
    try:
        with pytest.raises(ValueError if is_failing else RuntimeError, match=r"of the program|was killed"), rw.init():
            if is_failing:
                raise ValueError("of the program")
        assert not dist.is_initialized()
        assert signal.getsignal(signal.SIGCHLD) is worker_is_gone
    finally:
        signal.signal(signal.SIGCHLD, before)
