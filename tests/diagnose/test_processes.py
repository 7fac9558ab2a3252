"""Which processes are ranks, what is known of them, and how that is shown; without launchers, and without torch."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rankwise as rw
from rankwise._diagnose.folding import is_busy
from rankwise._diagnose.jobs import find_job, find_jobs
from rankwise._diagnose.processes import DiagnosisError, environ_of, is_python, own_processes
from rankwise._diagnose.sampling import ProcessSample
from rankwise._diagnose.sleep_times import sleep_seconds
from rankwise._diagnose.stack import Stack, StackFrame
from rankwise._rank_files import WaitNote, read_wait
from tests.diagnose.jobs import rankwise

SLEEP = "import time; print(flush=True); time.sleep(600)"
# As setproctitle does: something else in the memory that /proc shows as the variables.
RENAMED = f"""
import ctypes
fields = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()
begin, end = int(fields[47]), int(fields[48])
ctypes.memset(begin, 0, end - begin)
{SLEEP}
"""
SITE = "/venv/lib/python3.12/site-packages"


@contextlib.contextmanager
def ranks(
    *numbers: int, interpreter: str = sys.executable, code: str = SLEEP, **variables: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that sleep as ranks of a job."""
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}
    command = [interpreter, "-c", code]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in numbers:
            environ = os.environ | world | {"RANK": str(rank)}
            processes.append(stack.enter_context(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)))
            stack.callback(processes[-1].kill)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes


def test_an_interpreter_of_another_name_is_found(tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    shutil.copy(Path(sys.executable).resolve(), trainer)
    code = f"import ctypes; {SLEEP}"  # which every rank loads, with torch: some interpreters need no library before
    with ranks(0, interpreter=str(trainer), code=code, PYTHONHOME=sys.base_prefix) as (process,):
        assert is_python(process.pid)
        assert find_job(process.pid).pid == process.pid
    with subprocess.Popen(["sleep", "600"]) as other:
        assert not is_python(other.pid)
        other.kill()


def test_a_rank_that_has_renamed_itself_is_not_found() -> None:
    with ranks(1) as (other,), ranks(0, code=RENAMED) as (zero,):
        assert not environ_of(zero.pid)
        assert [rank.process.pid for rank in find_job(other.pid).ranks] == [other.pid]
        with pytest.raises(DiagnosisError):
            find_job(zero.pid)


@pytest.mark.slow
def test_launched_ranks_that_have_renamed_themselves_are_found(tmp_path: Path) -> None:
    program = tmp_path / "renamed.py"
    program.write_text(RENAMED)
    command = [sys.executable, "-m", "rankwise", "launch", "-n", "2", str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        try:
            assert launcher.stdout is not None
            for _ in range(2):
                launcher.stdout.readline()
            job = find_job(launcher.pid)
            assert [rank.rank for rank in job.ranks] == [0, 1]
            assert not any(environ_of(rank.process.pid) for rank in job.ranks)
        finally:
            launcher.terminate()


def test_ranks_that_an_engine_has_started_by_themselves_are_one_job() -> None:
    with ranks(0, RANKWISE_LAUNCH="rank-1a") as (zero,), ranks(1, RANKWISE_LAUNCH="rank-2b") as (one,):
        assert [rank.process.pid for rank in find_job(one.pid).ranks] == [zero.pid, one.pid]


def test_jobs_with_the_same_variables_are_told_apart() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    with ranks(0, 1) as first, subprocess.Popen(["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", code], env={
        **os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }, stdout=subprocess.PIPE) as shell:  # fmt: skip
        try:
            assert shell.stdout is not None
            shell.stdout.readline()
            jobs = [job for job in find_jobs() if job.processes & {first[0].pid, first[1].pid}]
            assert [[rank.process.pid for rank in job.ranks] for job in jobs] == [[process.pid for process in first]]
            assert [rank.rank for rank in find_job(shell.pid).ranks] == [0]
        finally:
            for process in psutil.Process(shell.pid).children(recursive=True):
                process.kill()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "rank 2: no process: ended, or not started"),
        pytest.param({}, "rank 2: not on this host: on another one, or ended", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_have_ended_are_named(variables: dict[str, str], text: str) -> None:
    with ranks(0, 1, **variables) as processes:
        assert text in rankwise("stacks", processes[0].pid, "--watch", 2, "--interval", 0.1).splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
def test_processes_of_other_users_are_not_read() -> None:
    with subprocess.Popen(["sleep", "600"], user=65534) as other, subprocess.Popen(["sleep", "600"]) as own:
        found = own_processes()
        other.kill()
        own.kill()
    assert own.pid in found
    assert other.pid not in found


def stack(*frames: tuple[str, str]) -> Stack:
    """Return a stack, the innermost frame first."""
    return Stack([StackFrame(function, file, 7) for function, file in frames])


def test_the_place_in_an_installed_program() -> None:
    library = ("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py")
    start = [("<module>", "/venv/bin/train"), ("_run_module_as_main", "<frozen runpy>")]
    program = stack(library, ("step", f"{SITE}/training/loop.py"), ("main", f"{SITE}/training/cli.py"), *start)
    assert program.location == "all_reduce at loop.py:7"
    wrapped = stack(
        library, ("backward", f"{SITE}/accelerate/accelerator.py"), ("main", f"{SITE}/training/cli.py"), *start
    )
    assert wrapped.location == "backward at cli.py:7"
    script = stack(library, ("main", "/home/user/bin/train"), ("<module>", "/home/user/bin/train"))
    assert script.location == "all_reduce at train:7"
    assert stack(library).location == "all_reduce at distributed_c10d.py:7"


def test_functions_of_c_with_debug_information_are_no_place_of_the_program() -> None:
    frames = [StackFrame("sleep", "libc.so.6", 0), StackFrame("_call_function_pointer", "callproc.c", 943)]
    program = Stack([*frames, StackFrame("hang", "/home/user/train.py", 7)])
    assert program.location == "hang at train.py:7"
    assert str(program).splitlines()[:2] == ["  sleep (native)", "  _call_function_pointer (native)"]


def test_frames_of_another_installation_of_rankwise_are_no_place_of_the_program() -> None:
    ours = [("run_once", "/other/src/rankwise/_net/polling.py"), ("all_reduce", "/other/src/rankwise/_comm/comm.py")]
    assert stack(*ours, ("main", "/home/user/rankwise/train.py")).location == "all_reduce at train.py:7"


def test_what_a_fork_server_has_forked_is_a_worker() -> None:
    multiprocessing = sysconfig.get_path("stdlib") + "/multiprocessing"
    server = [("main", f"{multiprocessing}/forkserver.py"), ("<module>", "<string>")]
    worker = [("__getitem__", "/home/user/data.py"), ("_main", f"{multiprocessing}/spawn.py"),
              ("_serve_one", f"{multiprocessing}/forkserver.py"), *server]  # fmt: skip
    assert is_busy(ProcessSample(pid=1, state="S", stack=stack(*worker)))
    assert not is_busy(
        ProcessSample(pid=1, state="S", stack=stack(("select", f"{multiprocessing}/selectors.py"), *server))
    )


def test_how_long_processes_have_slept() -> None:
    cores = os.sched_getaffinity(0)
    with subprocess.Popen(["sleep", "600"]) as process:
        while not (seconds := sleep_seconds([process.pid])):
            if not Path("/proc/self/sched").exists():
                process.kill()
                pytest.skip("this kernel has no /proc/PID/sched")
        then = time.monotonic()
        while time.monotonic() < then + 0.05:
            pass
        later = sleep_seconds([process.pid, 1 << 30])
        process.kill()
    assert later[process.pid] > seconds[process.pid]
    assert os.sched_getaffinity(0) == cores


def test_the_note_of_a_wait() -> None:
    unused, note = WaitNote(), WaitNote()
    descriptors = psutil.Process().num_fds()
    before = time.monotonic()
    note.write("barrier at train.py:1", before)
    assert read_wait(os.getpid()) is None  # too short
    note.write("all_reduce at train.py:88", before - 61)
    wait = read_wait(os.getpid())
    assert wait is not None
    assert wait.call == "all_reduce at train.py:88"
    assert wait.seconds >= 61
    note.write("x" * 10_000, before - 61)
    assert read_wait(os.getpid()) is not None
    assert psutil.Process().num_fds() == descriptors
    note.close()
    assert read_wait(os.getpid()) is None
    note.close()
    unused.close()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_rank_that_waits_notes_since_when(session: object) -> None:
    pids = rw.all_gather(os.getpid())
    if rw.get_rank() == 1:
        while (wait := read_wait(pids[0])) is None:
            time.sleep(0.05)
        assert wait.call.startswith("barrier at test_processes.py:")
        assert wait.seconds >= 1
    rw.barrier()
    assert read_wait(os.getpid()) is None or rw.get_rank() == 0


def test_top_on_a_narrow_terminal_ends_at_ctrl_c() -> None:
    with ranks(0, 1, 2):
        main, terminal = pty.openpty()
        environ = {**os.environ, "COLUMNS": "40", "LINES": "10", "TERM": "xterm"}
        command = [sys.executable, "-m", "rankwise", "top", "--interval", "0.1"]
        with subprocess.Popen(
            command, env=environ, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        ) as process:
            os.close(terminal)
            text, asked = b"", False
            with contextlib.suppress(OSError):  # the end of the output
                while select.select([main], [], [], 100)[0]:
                    text += os.read(main, 4096)
                    if b"running" in text and not asked:
                        process.send_signal(signal.SIGINT)
                        asked = True
        os.close(main)
    assert asked, text
    assert process.returncode == 0, text
    assert b"Traceback" not in text
    lines = text.decode(errors="replace").splitlines()
    assert lines[-1].endswith("\x1b[?25h"), lines[-1]  # the cursor is shown again


def test_top_on_a_dumb_terminal_prints_each_update() -> None:
    with ranks(0, 1, 2) as processes:
        main, terminal = pty.openpty()
        command = [sys.executable, "-m", "rankwise", "top", "--interval", "0.1", "--updates", "2"]
        environ = {**os.environ, "TERM": "dumb"}
        with subprocess.Popen(command, env=environ, stdin=terminal, stdout=terminal, stderr=terminal) as process:
            os.close(terminal)
            text = b""
            with contextlib.suppress(OSError):  # the end of the output
                while select.select([main], [], [], 100)[0]:
                    text += os.read(main, 4096)
        os.close(main)
        job = find_job(processes[0].pid)
    assert process.returncode == 0, text
    assert text.count(b"job %d: plain, 3 of 3 ranks here" % job.pid) == 2
    assert b"\x1b[?25" not in text  # the cursor is not hidden


@pytest.mark.slow
def test_top_without_a_terminal_prints_each_update() -> None:
    with ranks(0, 1, 2) as processes:
        output = rankwise("top", "--interval", 0.1, "--updates", 2)
        job = find_job(processes[0].pid)
    assert output.count(f"job {job.pid}: plain, 3 of 3 ranks here") == 2


def test_the_first_process_of_lightning_has_no_variables_and_is_a_rank() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    code = code.replace("])", f"], env={{**__import__('os').environ, **{world}}})")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (other,) = psutil.Process(process.pid).children()
        job = find_job(process.pid)
        other.kill()
    assert (job.launcher, job.world_size) == ("lightning", 2)
    assert [(rank.rank, rank.process.pid, rank.workers) for rank in job.ranks] == [
        (0, process.pid, ()),
        (1, other.pid, ()),
    ]


def test_frames_of_libraries_are_shown_in_one_line() -> None:
    own = [StackFrame(f"step_{line}", "/opt/rankwise/_comm/call.py", line) for line in (3, 2, 1)]
    of_torch = [StackFrame("wait", "/v/lib/python3.11/site-packages/torch/distributed/c10d.py", 5)]
    program = [StackFrame("train", "/home/me/torch/train.py", 8), StackFrame("<module>", "/home/me/torch/train.py", 9)]
    assert str(Stack([*own, *of_torch, *program])).splitlines() == [
        "  3 frames of rankwise: step_3 (call.py:3), called by step_1 (call.py:1)",
        '  File "/v/lib/python3.11/site-packages/torch/distributed/c10d.py", line 5 in wait',
        '  File "/home/me/torch/train.py", line 8 in train',
        '  File "/home/me/torch/train.py", line 9 in <module>',
    ]
    native = [StackFrame("epoll_wait", "/lib/libc.so.6", 0)]
    assert len(str(Stack([*native, *own])).splitlines()) == 4, "who asks for C++ wants to see all"
