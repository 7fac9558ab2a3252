"""What a session decides about its collectives: groups that others opened, checks, and patience."""

from __future__ import annotations

import re
import signal
import time

import pytest
import torch

import rankwise as rw
from rankwise._comm.control import channel
from rankwise._comm.control.page.memory import PageMemory
from rankwise._session.session import state_behind
from tests.session.worlds import clean_environ, free_port, plain, run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_that_is_adopted_is_checked_too(size: int) -> None:
    port = free_port()
    for process in run_ranks("adopted.py", [plain(rank, size, port) for rank in range(size)]):
        assert process.returncode == 0, process.stderr
        lines = process.stdout.splitlines()
        assert len(lines) == 6
        assert all("the value is float32[3] on cpu on rank" in line for line in lines)


def test_a_mesh_that_is_older_than_the_session_is_a_group() -> None:
    port = free_port()
    one, two = run_ranks("mesh_before_init.py", [plain(rank, 2, port) for rank in range(2)])
    assert one.returncode == 0, one.stderr
    assert re.fullmatch(r"a group of 2 ranks could not be made: rank 1 .*\nall_reduce.* rank 1 .*\n", one.stdout)
    assert two.returncode == -signal.SIGKILL, two.stderr


@pytest.mark.slow
def test_one_rank_may_work_longer_than_the_timeout() -> None:
    port = free_port()
    for process in run_ranks("patience.py", [plain(rank, 3, port) for rank in range(3)]):
        assert (process.returncode, process.stdout) == (0, "ok\n"), process.stderr


@pytest.mark.slow
def test_ranks_must_all_check_or_none() -> None:
    port = free_port()
    environs = [plain(rank, 2, port, RANKWISE_CHECK=str(rank)) for rank in range(2)]
    for process in run_ranks("patience.py", environs):
        assert process.returncode == 1
        assert "rank 0 has check=False, but rank 1 has check=True" in process.stderr


def test_what_to_check_is_read_from_the_environment() -> None:
    for value, check in (("1", True), ("0", False), ("", True)):
        with rw.init(environ=clean_environ(RANKWISE_CHECK=value)) as session:
            assert state_behind(session).comm.control.checks_tensors is check
    with rw.init(check=True, environ=clean_environ(RANKWISE_CHECK="0")) as session:
        assert state_behind(session).comm.control.checks_tensors is True
    with pytest.raises(rw.LauncherEnvironmentError, match="RANKWISE_CHECK='yes' is neither 0 nor 1"):
        rw.init(environ=clean_environ(RANKWISE_CHECK="yes"))


@pytest.mark.ranks(2, 3)
def test_a_group_that_one_rank_cannot_open_is_opened_by_none(
    session: rw.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of memory; and the ranks go on with others."""

    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    last = session.world_size - 1
    rw.barrier()
    for failing in ([last], [0, last]):
        fails = session.rank in failing
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(PageMemory, "map_window", refuse)
            expected = rw.CollectiveError if fails else rw.RemoteRankError
            with pytest.raises(expected, match="cannot be mapped"):
                rw.new_group([0, last])
            with pytest.raises(expected, match="cannot be mapped"):
                rw.node_group()
        assert rw.all_reduce(1) == last + 1
        with rw.new_group(range(last + 1)) as group:
            assert rw.all_reduce(torch.ones(10_000), group=group)[0] == last + 1
    assert rw.node_group().size == last + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_a_long_wait_is_reported_once_with_the_rank_that_is_missing(
    late: int, session: rw.Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank zero, or by the next rank if all wait for rank zero."""
    monkeypatch.setattr(channel, "_NOTICE_SECONDS", 0.1)
    rw.barrier(name="before")
    if session.rank == late:
        time.sleep(1.5)
    rw.barrier(name="after")
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if session.rank == 1 - late:
        assert len(texts) == 1
        assert re.match(r"barrier 'after' at test_session_collectives\.py:\d+ has waited for \d+ s, and may ", texts[0])
        assert f"rank {late}, last seen in barrier 'before' at test_session_collectives.py" in texts[0]
    else:
        assert not texts
