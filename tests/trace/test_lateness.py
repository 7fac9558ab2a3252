"""Which rank comes late, as a session and `rankwise top` know it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rankwise as rw
from rankwise._comm.control.page.layout import place_of_arrivals
from rankwise._trace.lateness import lateness_of
from rankwise._trace.page_arrivals import mean_lateness

PROGRAM = Path(__file__).parent / "programs" / "late.py"
CALL = "all_reduce at train.py:88"


def test_a_rank_is_late_after_half_of_the_ranks() -> None:
    calls = [((4, 5, 6, 7), CALL, (10.0 * step, 10.0 * step, 10.0 * step + 1, 10.0 * step + 3)) for step in range(20)]
    found = lateness_of(calls)
    assert [(one.rank, one.mean) for one in found] == [(7, 3.0), (6, 1.0), (4, 0.0), (5, 0.0)]
    assert found[0].worst == (3.0,) * 10
    assert found[0].recent == 3.0
    assert [one.is_chronic for one in found] == [True, True, False, False]
    assert str(found[0]) == f"rank 7: 3000 ms late as a rule, at most 3000 ms, in 20 calls of {CALL}"


def test_one_late_call_is_told_from_many_and_forgotten() -> None:
    late = [0.0] * 5 + [2.0] + [0.0] * 94
    often = lateness_of([((0, 1), CALL, (0.0, 0.5)) for _ in late])
    once = lateness_of([((0, 1), CALL, (0.0, each)) for each in late])
    assert (often[0].rank, often[0].is_chronic) == (1, True)
    assert (once[0].rank, once[0].is_chronic) == (1, False)
    assert once[0].worst[:2] == (2.0, 0.0)
    assert once[0].recent < once[0].mean / 2
    assert "now and then, at most 2000 ms" in str(once[0])


def test_call_sites_and_groups_are_told_apart() -> None:
    calls = [((0, 1), CALL, (0.0, 1.0)), ((2, 0), "barrier at train.py:90", (0.0, 4.0))]
    assert [(one.rank, one.call[:7]) for one in lateness_of(calls)[:2]] == [(0, "barrier"), (1, "all_red")]
    assert lateness_of([]) == []


@pytest.mark.ranks(2)
def test_a_session_names_the_rank_that_comes_late(session: rw.Session) -> None:
    group = rw.new_group([1, 0])
    for _ in range(3):
        if session.rank == 1:
            time.sleep(0.05)
        rw.barrier()
        if session.rank == 0:
            time.sleep(0.05)
        rw.all_reduce(1, group=group)
    rw.barrier()
    found = [(one.rank, one.call.partition(" ")[0], one.num_calls) for one in session.lateness()]
    assert sorted(found[:2]) == [(0, "all_reduce", 3), (1, "barrier", 3)]
    pids = rw.all_gather(os.getpid())
    of_barriers = mean_lateness(pids[0], 2, place_of_arrivals(2))
    rw.barrier()  # nobody comes to the next call before that
    assert sorted(of_barriers) == [0, 1]
    assert max(of_barriers, key=of_barriers.__getitem__) == 1, of_barriers


@pytest.mark.ranks(2)
def test_a_closed_session_knows_nothing(session: rw.Session) -> None:
    session.close()
    with pytest.raises(rw.NotJoinedError):
        session.lateness()


@pytest.mark.slow
def test_top_and_the_report_of_a_hang_name_the_rank_that_came_late() -> None:
    command = [sys.executable, "-m", "rankwise", "launch", "-n", "3", str(PROGRAM), "1", "0.05", "20", "stop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "late before" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        ps = [sys.executable, "-m", "rankwise", "ps", str(process.pid)]
        table = subprocess.run(ps, capture_output=True, text=True, check=True)
        found = subprocess.run([*ps, "--json"], capture_output=True, text=True, check=True)
        process.send_signal(signal.SIGINT)
    assert "late before: rank 1, " in lines[-1], lines
    late = [rank["late"] for rank in json.loads(found.stdout)[0]["ranks"]]
    assert late.index(max(late)) == 1
    assert f"{1000 * late[1]:.0f} ms" in table.stdout
