"""The public launching API: scripts, modules and programs as a command and as a library; functions in two steps."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankwise as rw
from rankwise.launching import FunctionLaunch, Nodes, Output, ScriptLaunch, check_nproc, parse_nproc
from tests.session.worlds import clean_environ, free_port, run_in
from tests.tables import each_row

# Without their types, for calls that a type checker refuses.
SCRIPT: Any = ScriptLaunch
OUTPUT: Any = Output
LAUNCH: Any = rw.launch

PRINT = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(PRINT)
    return path


def lines(captured: pytest.CaptureFixture[str]) -> list[str]:
    return sorted(captured.readouterr().out.splitlines())


def test_a_script_runs_in_ranks(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    ScriptLaunch(str(script), ["--lr", "0.1"], nproc=2).run()
    assert lines(capsys) == ["[0] 0 2 --lr 0.1", "[1] 1 2 --lr 0.1"]
    ScriptLaunch(str(script), nproc=2, output=Output(prefix=False, show=[1]), append_local_rank=True).run()
    assert lines(capsys) == ["1 2 --local_rank=1"]
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.slow
def test_a_module_and_a_program_run_in_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    ScriptLaunch("calendar", ["2024", "2"], nproc=1, kind="module").run()
    assert "February 2024" in capsys.readouterr().out
    ScriptLaunch(sys.executable, ["-c", PRINT], nproc=2, kind="program", preload=False).run()
    assert lines(capsys) == ["[0] 0 2", "[1] 1 2"]


def test_a_rank_that_fails_is_an_error_with_its_exit_code(script: Path) -> None:
    script.write_text("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    with pytest.raises(rw.RankFailedError, match="rank 1 of 2") as caught:
        ScriptLaunch(str(script), nproc=2).run()
    assert (caught.value.rank, caught.value.exitcode) == (1, 7)
    with pytest.raises(rw.InvalidArgumentError, match="script 'missing\\.py' does not exist"):
        ScriptLaunch("missing.py", nproc=2).run()


@pytest.mark.slow
def test_the_store_listens_on_the_first_port_that_is_free(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import os; print(os.environ['MASTER_PORT'])")
    port = free_port()
    ScriptLaunch(str(script), nproc=1, ports=(port, 0)).run()
    assert lines(capsys) == [str(port)]


def test_a_command_has_an_exit_status(tmp_path: Path) -> None:
    program = tmp_path / "command.py"
    program.write_text(
        textwrap.dedent("""\
            import sys
            from rankwise.launching import ScriptLaunch
            for target in ("fail.py", "missing.py"):
                print(ScriptLaunch(target, nproc=2).run_as_command("train"), flush=True)
        """)
    )
    (tmp_path / "fail.py").write_text("import os, signal; os.environ['RANK'] == '0' and os.kill(os.getpid(), 9)")
    ended = run_in(tmp_path, [sys.executable, str(program)])
    assert ended.stdout.splitlines() == ["137", "2"], ended.stderr
    assert "train: rank 0 of 2" in ended.stderr
    assert "train: script 'missing.py' does not exist" in ended.stderr


@pytest.mark.slow
def test_sigterm_to_a_command_stops_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "stay.py").write_text("import time; print('ready', flush=True); time.sleep(1000)")
    code = "import sys; from rankwise.launching import ScriptLaunch; "
    code += "sys.exit(ScriptLaunch('stay.py', nproc=2).run_as_command('train'))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env=clean_environ(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert ["ready" in process.stdout.readline() for _ in range(2)] == [True, True]
        process.terminate()
        assert process.wait(200) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_scripts_run_on_several_hosts(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    launches = [
        ScriptLaunch(str(script), nproc=1, nodes=Nodes(num_nodes=2, node_rank=rank, address=address))
        for rank in range(2)
    ]
    threads = [threading.Thread(target=launch.run) for launch in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert lines(capsys) == ["0 2", "1 2"]


@pytest.mark.slow
def test_a_function_is_pickled_when_its_launch_is_made() -> None:
    values = [1]
    launch = FunctionLaunch(lambda: sum(values) + rw.get_rank(), nproc=2)
    values.append(100)
    results: list[list[int]] = []
    thread = threading.Thread(target=lambda: results.append(launch.run()))
    thread.start()
    thread.join(200)
    assert results == [[1, 2]]


@pytest.mark.slow
def test_setup_runs_before_the_function_is_unpickled() -> None:
    launch = FunctionLaunch(lambda: sys.modules["rankwise.compat.ignite"].__name__, nproc=1, setup=_install)
    assert launch.run() == ["rankwise.compat.ignite"]


def _install() -> None:
    import rankwise.compat.ignite  # noqa: F401, PLC0415 - only in the rank


@each_row(
    ("make", "said"),
    [
        (lambda: SCRIPT("x.py", nproc=0), "nproc=0 is not a number of processes"),
        (lambda: SCRIPT("x.py", nproc=True), "nproc=True is not a number of processes"),
        (lambda: SCRIPT(3, nproc=1), "target=3, of type int, is not a string"),
        (lambda: SCRIPT("x.py", "--lr 1", nproc=1), "args='--lr 1' is not a sequence of strings"),
        (lambda: SCRIPT("x.py", [1], nproc=1), "an argument of the target=1, of type int, is not a string"),
        (lambda: SCRIPT("x.py", nproc=1, kind=["module"]), "kind=['module'] is none of 'script', 'module', 'pr"),
        (lambda: SCRIPT("x.py", nproc=1, max_restarts=-1), "max_restarts=-1 is below 0"),
        (lambda: SCRIPT("x.py", nproc=1, grace=-1), "grace=-1 is not a number of seconds"),
        (lambda: SCRIPT("x.py", nproc=1, ports=[70000]), "ports=[70000] is not a sequence of ports"),
        (lambda: SCRIPT("x.py", nproc=1, nodes=2), "nodes=2 is not a rankwise.launching.Nodes"),
        (lambda: SCRIPT("x.py", nproc=2, output=Output(show=[0, 5])), "show names rank 5, and of 2 ranks"),
        (lambda: OUTPUT(show="0"), "show='0' is not a collection of ranks"),
        (lambda: OUTPUT(prefix=1), "prefix=1 is neither a bool nor some of host, time, rank"),
        (lambda: Nodes(num_nodes=0, address="a:1"), "no numbers of hosts"),
        (lambda: Nodes(num_nodes=2, min_nodes=3, address="a:1"), "no numbers of hosts"),
        (lambda: Nodes(num_nodes=2, node_rank=2, address="a:1"), "node_rank=2 is not one of 2 hosts"),
        (lambda: Nodes(num_nodes=2, address="a"), "address='a' is not host:port"),
        (lambda: LAUNCH(print, nproc=1, output=True), "output=True is not a rankwise.launching.Output"),
        (lambda: LAUNCH(3, nproc=1), "launch takes a function and its arguments, got 3"),
        (lambda: FunctionLaunch(print, nproc=1, setup=lambda: None), "is not a function of a module that ranks can"),
        (lambda: check_nproc(-1), "nproc=-1 is not a number of processes"),
        (lambda: parse_nproc("many"), "'many' is not a number, nor one of auto, cpu, gpu"),
    ],
)
def test_misuse_is_an_error_before_any_process_is_started(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(rw.InvalidArgumentError) as caught:
        make()
    assert said in str(caught.value)
