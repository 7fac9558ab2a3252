"""A program ends, by itself or not, while non-blocking collectives are pending."""

from __future__ import annotations

import re
import signal

import pytest

from tests.lanes import variants
from tests.session.worlds import free_port, plain, run_ranks

NEVER = r"started with async_op=True, and never waited for: "


def run(how: str, program: str = "pending.py") -> tuple[tuple[int, str, str], tuple[int, str, str]]:
    port = free_port()
    zero, one = run_ranks(program, [plain(rank, 2, port) for rank in range(2)], how, fresh=True)
    return (zero.returncode, zero.stdout, zero.stderr), (one.returncode, one.stdout, one.stderr)


@pytest.mark.parametrize("how", variants(["exit", "finalize"], slow=["exit"]))
def test_the_end_of_a_session_waits_for_pending_collectives(how: str) -> None:
    zero, one = run(how)
    assert (zero[0], one[0]) == (0, 0), zero[2] + one[2]
    assert one[1] == "2\n"
    assert zero[1] == ("2\n" if how == "finalize" else "")
    assert re.search(rf"{NEVER}barrier at pending.py:16", zero[2])
    assert "failed" not in zero[2]
    assert one[2] == ""


@pytest.mark.slow
def test_a_pending_collective_that_another_rank_never_calls_ends_with_the_timeout() -> None:
    zero, one = run("timeout")
    assert (zero[0], one[0]) == (0, 0), zero[2] + one[2]
    assert zero[1] == "left\n"
    assert re.search(
        r"all_reduce at pending.py:15 failed, and was never waited for: .*CollectiveTimeoutError: .*Missing: rank 1",
        zero[2],
    ), zero[2]


@pytest.mark.slow
def test_a_program_that_ends_with_an_error_does_not_wait() -> None:
    zero, one = run("raise")
    assert zero[0] == 1
    assert "ValueError: no data" in zero[2]
    assert re.search("rank 0 left with ValueError: no data", one[1]), one


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_a_result() -> None:
    zero, one = run("interrupt")
    assert zero[0] == -signal.SIGINT, zero
    assert "KeyboardInterrupt" in zero[2]
    assert "rank 0" in one[1], one


@pytest.mark.slow
def test_the_death_of_a_rank_is_raised_by_wait() -> None:
    zero, one = run("die")
    assert one[0] == -signal.SIGKILL
    assert re.search("all_reduce at pending.py:15 failed: rank 1", zero[1]), zero
    assert zero[0] == 0, zero[2]


TRANSFER = r"send/recv from rank 0 to rank 1 at pending_transfer.py:14"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("die", rf"CollectiveError {TRANSFER} failed: rank 0 .*"),
        pytest.param(
            "raise",
            rf"CollectiveError {TRANSFER} failed: rank 0 left with ValueError: no data.*",
            marks=pytest.mark.rare,
        ),
        ("never", rf"CollectiveTimeoutError {TRANSFER}: .*Missing: rank 0.*"),
        pytest.param("other", rf"CollectiveTimeoutError {TRANSFER}: .*Missing: rank 0.*", marks=pytest.mark.rare),
    ],
)
def test_the_error_of_a_sender_is_raised_by_wait(how: str, expected: str) -> None:
    zero, one = run(how, "pending_transfer.py")
    assert zero[0] == {"die": -signal.SIGKILL, "raise": 1}.get(how, 0), zero[2]
    assert one[0] == 0, one[2]
    assert re.fullmatch(expected, one[1].strip()), one[1]


@pytest.mark.parametrize("how", variants(["exit", "nothing"], slow=["nothing"]))
def test_the_interpreter_waits_for_a_pending_recv_until_the_value_is_there_or_the_sender_has_left(how: str) -> None:
    zero, one = run(how, "pending_transfer.py")
    assert (zero[0], one[0]) == (0, 0), zero[2] + one[2]
    assert re.search(rf"{NEVER}recv at pending_transfer.py:14", one[2])
    assert re.search(rf"{NEVER}send at pending_transfer.py:15", one[2])
    failure = "recv at pending_transfer.py:14 failed, and was never waited for: .*rank 0 left the session"
    assert bool(re.search(failure, one[2])) == (how == "nothing"), one[2]
