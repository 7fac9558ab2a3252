"""launch(fn): results, the original exceptions, and no process or file left behind."""

from __future__ import annotations

import gc
import linecache
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise as rw
from rankwise.launching import Nodes
from tests.lanes import variants
from tests.session.worlds import free_port


class Unreadable(Exception):  # noqa: N818 - it is one of the user's
    """An exception that can be pickled, but not read again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} {second}")


def add(offset: int) -> float:
    with rw.init(timeout=100.0):
        return rw.all_reduce(rw.get_rank() + offset)


def add_and_name(offset: int) -> tuple[int, float]:
    return rw.get_rank(), add(offset)


def test_results_come_back_by_rank() -> None:
    assert rw.launch(add_and_name, 10, nproc=3) == [(0, 33), (1, 33), (2, 33)]


def test_lambdas_closures_and_tensors_travel() -> None:
    weight = torch.ones(3)
    results = rw.launch(lambda scale: weight * scale * rw.get_rank(), 2.0, nproc=2)
    assert [result.tolist() for result in results] == [[0.0] * 3, [2.0] * 3]


def test_the_original_exception_is_the_cause() -> None:
    def divide() -> float:
        return 1 / (1 - rw.get_rank())

    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(divide, nproc=2)
    error = caught.value
    assert (error.rank, error.exitcode) == (1, 1)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "return 1 / (1 - rw.get_rank())" in error.traceback
    assert "rankwise/launch" not in error.traceback, "the frames are the user's"
    assert str(error).startswith("rank 1 of 2 on ")


def test_an_exception_that_the_caller_handles_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """As that of a pruned trial, of which a search has hundreds."""

    def prune() -> None:
        with rw.init():
            raise LookupError("pruned")

    with pytest.raises(rw.RankFailedError, match="LookupError: pruned"):
        rw.launch(prune, nproc=2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_an_exception_that_cannot_travel_comes_as_text() -> None:
    def fail() -> None:
        raise Unreadable(1, 2)

    with pytest.raises(rw.RankFailedError, match=r"Unreadable: 1 2") as caught:
        rw.launch(fail, nproc=1)
    assert caught.value.__cause__ is None


@pytest.mark.slow
def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(rw.RankFailedError, match="returned a lock, which cannot be pickled"):
        rw.launch(lambda: __import__("threading").Lock(), nproc=1)


def test_the_cause_comes_first_and_its_consequences_after() -> None:
    def one_dies() -> None:
        with rw.init(timeout=100.0):
            if rw.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            rw.barrier()

    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(one_dies, nproc=3)
    assert (caught.value.rank, caught.value.exitcode) == (2, -signal.SIGKILL)
    assert "rank 2 of 3" in str(caught.value).splitlines()[0]
    assert "was killed by SIGKILL (out of memory?)" in str(caught.value)


@pytest.mark.parametrize(("status", "code"), variants([(3, 3), ("text", 1)], fast=[(3, 3)]))
def test_exit_codes_are_kept(status: int | str, code: int) -> None:
    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(sys.exit, status, nproc=1)
    assert caught.value.exitcode == code


def test_a_rank_that_ends_without_returning_has_failed() -> None:
    def leave() -> int:
        if rw.get_rank() == 0:
            os._exit(0)
        return rw.get_rank()

    with pytest.raises(rw.RankFailedError, match="ended without returning") as caught:
        rw.launch(leave, nproc=2)
    assert caught.value.rank == 0
    assert rw.launch(sys.exit, 256, nproc=1) == [None], "which is status 0"


@pytest.mark.slow
def test_an_exception_that_only_its_rank_knows_comes_as_text(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("class Odd(Exception): pass\n")

    def fail(folder: str) -> None:
        sys.path.insert(0, folder)
        raise __import__("only_here").Odd("strange")

    with pytest.raises(rw.RankFailedError, match=r"only_here\.Odd: strange") as caught:
        rw.launch(fail, str(tmp_path), nproc=1)
    assert caught.value.__cause__ is None


@pytest.mark.slow
def test_the_librarys_own_errors_travel() -> None:
    def fail() -> None:
        with rw.init(timeout=100.0), rw.rank_zero_first():
            raise FileNotFoundError("no such dataset")

    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(fail, nproc=2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.rank, copy.failures, str(copy)) == (caught.value.rank, caught.value.failures, str(caught.value))
    remote = rw.RemoteRankError(rank=3, host="h", raised="ValueError: x", traceback="ValueError: x")
    assert pickle.loads(pickle.dumps(remote)).traceback == "ValueError: x"


@pytest.mark.slow
def test_the_first_error_is_the_cause_though_its_rank_ends_last() -> None:
    def fail() -> None:
        import atexit  # noqa: PLC0415 - a function is carried to other processes
        import time  # noqa: PLC0415

        if rw.get_rank() == 1:
            atexit.register(time.sleep, 1.0)
            raise ValueError("the first")
        time.sleep(0.3)
        raise KeyError("the second")

    with pytest.raises(rw.RankFailedError, match=r"rank 1 of 2 .* raised ValueError") as caught:
        rw.launch(fail, nproc=2)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    assert caught.value.exitcode == 1


@pytest.mark.slow
def test_a_rank_that_is_slow_to_end_keeps_its_exit_code() -> None:
    """It is stopped while it ends, since the other rank fails because of that, and ends sooner."""

    def leave() -> None:
        import atexit  # noqa: PLC0415 - a function is carried to other processes
        import time  # noqa: PLC0415

        with rw.init(timeout=100.0):
            if rw.get_rank() == 1:
                atexit.register(time.sleep, 1.0)
                sys.exit(3)
            rw.barrier()

    with pytest.raises(rw.RankFailedError, match=r"rank 1 of 2 .* ended with exit code 3") as caught:
        rw.launch(leave, nproc=2)
    assert [(failure.rank, failure.exitcode) for failure in caught.value.failures] == [(1, 3), (0, 1)]


def test_a_crash_comes_with_its_stack() -> None:
    def crash() -> None:
        import faulthandler  # noqa: PLC0415 - a function is carried to other processes

        if rw.get_rank() == 1:
            faulthandler._sigsegv()  # type: ignore[attr-defined]
        with rw.init(timeout=100.0):
            pass

    with pytest.raises(rw.RankFailedError, match=r"SIGSEGV \(a crash in compiled code\)") as caught:
        rw.launch(crash, nproc=2)
    assert caught.value.rank == 1
    assert "Fatal Python error: Segmentation fault" in caught.value.traceback
    assert " in crash" in caught.value.traceback
    assert caught.value.failures[1].stopped


@pytest.mark.slow
def test_the_crash_of_a_ranks_child_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fork() -> None:
        import faulthandler  # noqa: PLC0415 - a function is carried to other processes

        if not os.fork():
            faulthandler._sigsegv()  # type: ignore[attr-defined]
        os.wait()

    rw.launch(fork, nproc=2)
    assert capsys.readouterr().err.count("Fatal Python error: Segmentation fault") == 2


@pytest.mark.slow
def test_large_arguments_results_and_errors_travel() -> None:
    weights = torch.arange(3_000_000)
    assert [int(result.sum()) for result in rw.launch(lambda w: w + 1, weights, nproc=2)] == [
        int(weights.sum()) + 3_000_000
    ] * 2

    def fail() -> None:
        raise ValueError("x" * 10_000_000)

    with pytest.raises(rw.RankFailedError) as caught:
        rw.launch(fail, nproc=2)
    assert (
        len(str(caught.value.__cause__))
        == len(caught.value.traceback.rpartition("ValueError: ")[2].strip())
        == 10_000_000
    )
    assert len(str(caught.value)) < 10_000
    assert "characters left out" in str(caught.value)


@pytest.mark.slow
def test_the_callers_process_stays_as_it_is() -> None:
    """After a success, and after a failure whose error is kept."""

    def fail() -> None:
        raise ValueError

    rw.launch(rw.get_rank, nproc=2)  # torch's first store in a process opens a pipe for good
    gc.collect()  # garbage of earlier tests, which would close descriptors while they are counted
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    variables, descriptors = dict(os.environ), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    threads = threading.active_count()
    rw.launch(rw.get_rank, nproc=2)
    with pytest.raises(rw.RankFailedError) as kept:
        rw.launch(fail, nproc=2)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before
    assert dict(os.environ) == variables
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    assert threading.active_count() == threads
    assert isinstance(kept.value.__cause__, ValueError)


@pytest.mark.slow
def test_functions_of_a_script_without_a_guard_run(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import rankwise\n"
        "factor = 10\n"
        "def scale(x):\n"
        "    return factor * x * rankwise.get_rank()\n"
        "print(rankwise.launch(scale, 2, nproc=2))\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=True)
    assert ended.stdout == "[0, 20]\n"


@pytest.mark.slow
def test_launches_side_by_side() -> None:
    with ThreadPoolExecutor(max_workers=2) as pool:
        both = [pool.submit(rw.launch, add, offset, nproc=2) for offset in (0, 10)]
        assert [results.result() for results in both] == [[1, 1], [21, 21]]


@pytest.mark.slow
def test_sys_exit_without_a_code_is_an_end_like_any_other() -> None:
    assert rw.launch(sys.exit, nproc=2) == [None, None]


@pytest.mark.parametrize("nproc", [0, -1, 10**6, True, 2.0, "2"])
def test_numbers_that_are_no_numbers_of_ranks_are_refused(nproc: int) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="nproc="):
        rw.launch(add, 1, nproc=nproc)


def test_a_call_that_cannot_be_pickled_is_refused_before_ranks_start() -> None:
    lock = threading.Lock()
    with pytest.raises(rw.InvalidArgumentError, match="cannot be carried to other processes"):
        rw.launch(lambda: lock, nproc=2)


@pytest.mark.slow
def test_a_callers_session_stays_as_it_is() -> None:
    with rw.init() as session:
        assert rw.launch(add, 0, nproc=2) == [1, 1]
        assert rw.all_reduce(1) == 1
        assert session.world_size == 1


@pytest.mark.slow
def test_functions_run_on_several_hosts() -> None:
    """Each host has its own launcher, which returns the results of its own ranks."""
    address = f"127.0.0.1:{free_port()}"

    def host(number: int) -> list[float]:
        return rw.launch(add, number, nproc=2, nodes=Nodes(num_nodes=2, node_rank=number, address=address))

    with ThreadPoolExecutor(2) as hosts:
        assert list(hosts.map(host, range(2))) == [[8, 8], [8, 8]]


def test_code_by_value_keeps_its_file_and_its_lines() -> None:
    """Cloudpickle 3.1.3 gives all of it one name; code in no file, such as a cell of a notebook, brings its lines."""
    source = "def outer(number):\n    return lambda: number / 0\n"
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(keepends=True), "<cell>")
    defined: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), defined)  # noqa: S102
    try:
        with pytest.raises(rw.RankFailedError) as caught:
            rw.launch(defined["outer"](1), nproc=1)
    finally:
        del linecache.cache["<cell>"]
    assert '  File "<cell>", line 2, in <lambda>\n    return lambda: number / 0\n' in caught.value.traceback
