"""The report of a failed world: the class and the first line of the message of any exception of each rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rankwise as rw
from rankwise._launch.rank_traceback import format_traceback
from rankwise._launch.report import describe_failures
from rankwise.errors import RankFailure, summary
from tests.lanes import variants
from tests.session.worlds import clean_environ
from tests.tables import each_row

LAUNCH = [str(Path(sys.executable).with_name("rankwise")), "launch"]


class UnprintableError(RuntimeError):
    def __str__(self) -> str:
        raise SystemExit("no")


def noted() -> BaseException:
    error = ValueError("no")
    error.__notes__ = ["a note"]  # add_note() came with Python 3.11
    return error


def from_another() -> BaseException:
    error = KeyError("x")
    error.__cause__ = ZeroDivisionError("y")
    return error


def raised_by(code: str) -> BaseException:
    try:
        exec(code, {"torch": torch, "json": json, "__name__": "__main__"})  # noqa: S102 - the test's own
    except BaseException as error:  # noqa: BLE001 - all of it is looked at
        return error
    raise AssertionError


@each_row(
    ("error", "wanted"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError("\n\n  first  \nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 1_000_000), f"ValueError: {'x' * 200}..."),
        (KeyError("k"), "KeyError: 'k'"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (noted(), "ValueError: no"),
        (from_another(), "KeyError: 'x'"),
        (UnprintableError(), f"{__name__}.UnprintableError: <UnprintableError.__str__ failed>"),
        (
            rw.RemoteRankError(rank=1, host="h", raised="KeyError: 'k'", traceback="T"),
            "rankwise.errors.RemoteRankError: rank 1",
        ),
        (raised_by("class Mine(Exception): pass\nraise Mine('x')"), "Mine: x"),
        (raised_by("torch.nn.Linear(1, 1).load_state_dict({})"), "RuntimeError: Error(s) in loading state_dict for"),
        (raised_by("json.loads('{')"), "json.decoder.JSONDecodeError: Expecting property name"),
        (raised_by("compile('x = (', 'f.py', 'exec')"), "SyntaxError: '(' was never closed (f.py, line 1)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_its_class_and_the_first_line_of_its_message(error: BaseException, wanted: str) -> None:
    assert summary(error).startswith(wanted)
    assert len(summary(error)) < 300


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions came with Python 3.11")
def test_a_group_of_errors_is_its_own_message() -> None:
    error = raised_by("raise ExceptionGroup('two', [ValueError('a'), ExceptionGroup('in', [KeyError('k')])])")
    assert summary(error) == "ExceptionGroup: two (2 sub-exceptions)"


def test_a_traceback_has_the_thousand_frames_nearest_to_the_error() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        text = format_traceback(raised_by("def f(n):\n    return f(n - 1) if n else 1 / 0\nf(3000)"))
    finally:
        sys.setrecursionlimit(limit)
    assert "[Previous line repeated 997 more times]" in text
    assert text.endswith("ZeroDivisionError: division by zero\n")


def failure(rank: int, raised: str) -> RankFailure:
    return RankFailure(rank=rank, host="h", exitcode=1, raised=raised, traceback=f"T{rank}")


def test_ranks_that_raised_alike_share_a_line() -> None:
    text = describe_failures(
        [
            failure(3, "ValueError: no"),
            *(failure(rank, "KeyError: 'k'") for rank in (0, 2)),
            *(failure(rank, f"RuntimeError: port {rank}") for rank in (4, 1)),
            *(RankFailure(rank=rank, host="h", exitcode=-15, stopped=True) for rank in (5, 6)),
        ],
        7,
    )
    first, *_, alike, different, stopped = text.splitlines()
    assert first == "rank 3 of 7 on h raised ValueError: no"
    assert alike == "ranks 0, 2 then raised KeyError: 'k'"
    assert different == "ranks 1, 4 then raised RuntimeError"
    assert stopped == "ranks 5-6 then were stopped (SIGTERM)"


EXTRA: list[list[str]] = [[], ["--no-preload"]]


@pytest.mark.parametrize("extra", variants(EXTRA, slow=EXTRA[:1]), ids=["forked", "fresh"])
def test_a_message_of_several_lines_is_reported(extra: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.stderr.write('unfinished')\nraise ValueError('first\\nsecond')\n")
    ended = subprocess.run(
        [*LAUNCH, "-n", "1", *extra, str(script)],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    host = ended.stderr.partition(" on ")[2].partition(" ")[0]
    assert ended.stderr.startswith(f"unfinished\nrankwise: rank 0 of 1 on {host} raised ValueError: first\n\nTraceback")
    assert ended.stderr.endswith("ValueError: first\nsecond\n\n")


def fail() -> None:
    rw.init()
    if rw.get_rank():
        rw.barrier()
    else:
        rw.all_reduce(1)


def test_a_failed_function_is_reported() -> None:
    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(fail, nproc=2)
    headline = str(caught.value).partition("\n")[0]
    assert headline.endswith("raised rankwise.errors.MismatchError: " + str(caught.value.__cause__).partition("\n")[0])
    assert [one.raised.partition(":")[0] for one in caught.value.failures] == ["rankwise.errors.MismatchError"] * 2
