"""Every error of rankwise, copied and pickled: other processes and test frameworks get them so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import rankwise as rw
from rankwise import errors
from tests.tables import each_row

FAILURE = rw.RankFailure(rank=1, host="h", exitcode=3, raised="ValueError: x", traceback="ValueError: x")
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]
COPIES: dict[str, Callable[[BaseException], BaseException]] = {"copy": copy.copy, "deepcopy": copy.deepcopy}


def made(kind: type[BaseException]) -> BaseException:
    """Return an error of a class, with all that its class keeps."""
    if kind is rw.RemoteRankError:
        return rw.RemoteRankError(rank=3, host="h", raised="ValueError: x", traceback="ValueError: x")
    if kind is rw.RankFailedError:
        return rw.RankFailedError("rank 1 failed", failures=[FAILURE])
    return kind("what happened")


def check_again(kind: type[BaseException], again: Callable[[BaseException], BaseException]) -> None:
    """Check that an error of a class that was copied is as the first one."""
    error = made(kind)
    error.__notes__ = ["while reading the third file"]  # as add_note() of Python 3.11 does
    error.step = 7  # type: ignore[attr-defined]  # as users do
    other = again(error)
    assert type(other) is kind
    assert str(other) == str(error)
    assert other.__dict__ == error.__dict__
    assert again(other).__dict__ == error.__dict__


@each_row("kind", KINDS)
@each_row("again", COPIES.values(), ids=COPIES)
def test_an_error_that_is_copied_keeps_all_it_has(
    kind: type[BaseException], again: Callable[[BaseException], BaseException]
) -> None:
    check_again(kind, again)


@each_row("kind", KINDS)
@each_row("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_that_is_pickled_keeps_all_it_has(kind: type[BaseException], protocol: int) -> None:
    check_again(kind, lambda error: pickle.loads(pickle.dumps(error, protocol)))


def test_how_a_rank_ended_is_a_value() -> None:
    error = made(rw.RankFailedError)
    assert isinstance(error, rw.RankFailedError)
    assert error.failures == (FAILURE,)
    assert (error.rank, error.host, error.exitcode, error.traceback) == (1, "h", 3, "ValueError: x")
    assert pickle.loads(pickle.dumps(FAILURE)) == copy.deepcopy(FAILURE) == FAILURE


class Unreadable:
    """Like a tensor without memory, whose repr would crash the process."""

    data_ptr = None

    def __repr__(self) -> str:
        raise SystemExit


def test_tensors_are_not_read_for_a_message() -> None:
    assert errors.shown(Unreadable()) == "<Unreadable>"
    assert errors.shown([1, {"a": (Unreadable(),)}]) == "<list>"
    assert errors.shown({"a": [1]}) == "{'a': [1]}"
    endless: list[object] = []
    endless.append(endless)
    assert errors.shown(endless) == "<list>"
