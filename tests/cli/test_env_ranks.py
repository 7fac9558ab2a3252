"""`rankwise env --all`: the ranks of a world meet, and rank zero shows where they differ."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from rankwise._rendezvous import store
from tests.cli.test_env_command import RANKWISE, SECONDS, Ended, env, lines_of
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port

AGENT = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
# A rank of `--all` that ends after the ranks have met: before its report is sent, or in it.
ENDS_LATE = (
    "import os, signal, sys\n"
    "from rankwise.cli import env_report\n"
    "from rankwise.cli.main import main\n"
    "how = sys.argv.pop(1)\n"
    "def end(*_):\n"
    "    if how == 'dies':\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    raise LookupError('no report')\n"
    "env_report.report_on = end\n"
    "main()\n"
)


def run_all(commands: Sequence[Sequence[str]], environs: Sequence[dict[str, str]]) -> list[Ended]:
    """Run commands at the same time."""
    with contextlib.ExitStack() as stack:
        pipe = subprocess.PIPE
        started = [
            subprocess.Popen(command, env=clean_environ(**environ), stdout=pipe, stderr=pipe, text=True)
            for command, environ in zip(commands, environs, strict=True)
        ]
        for process in started:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        ended = [process.communicate(timeout=SECONDS) for process in started]
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in zip(started, ended, strict=True)
        ]


def all_ranks(environs: Sequence[dict[str, str]], *args: str) -> list[Ended]:
    return run_all([[RANKWISE, "env", "--all", *args]] * len(environs), environs)


def world(size: int) -> list[dict[str, str]]:
    port = str(free_port())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "WORLD_SIZE": str(size), **address} for rank in range(size)]


def test_all_shows_where_the_ranks_differ() -> None:
    environs = world(3)
    for rank, environ in enumerate(environs):
        environ |= {"CUDA_VISIBLE_DEVICES": str(rank % 2), "RANKWISE_TYPO": "1"}
    first, *others = all_ranks(environs)
    assert [other.returncode for other in others] == [0, 0]
    assert [other.stdout + other.stderr for other in others] == ["", ""]
    lines = first.stdout.splitlines()
    assert first.returncode == 0, first.stderr
    assert lines[0].split() == ["rank", "local_rank", "CUDA_VISIBLE_DEVICES"]
    assert [line.split() for line in lines[1:4]] == [["0", "0", "0"], ["1", "1", "1"], ["2", "2", "0"]]
    assert "all else is the same on the 3 ranks" in first.stdout
    assert "warning of ranks 0-2: RANKWISE_TYPO is set" in first.stdout


def test_all_as_json_has_every_rank_complete() -> None:
    first, second = all_ranks(world(2), "--json")
    assert second.stdout == ""
    found = json.loads(first.stdout)
    assert found["differs"] == ["rank", "local_rank"]
    assert [one["facts"]["rank"]["value"] for one in found["ranks"]] == [0, 1]
    assert [one["facts"]["local_rank"] for one in found["ranks"]] == [
        {"value": rank, "source": "the other ranks"} for rank in range(2)
    ]


def test_all_alone_is_the_table_of_the_process() -> None:
    assert lines_of(env("--all"))["rank"] == ["0", "no", "launcher"]
    assert lines_of(env("--all", **world(1)[0]))["rank"] == ["0", "RANK"]
    found = json.loads(env("--all", "--json").stdout)
    assert (len(found["ranks"]), found["differs"]) == (1, [])


@pytest.mark.parametrize("missing", variants([0, 1], fast=[0]))
def test_all_without_a_rank_names_it(missing: int) -> None:
    environs = world(3)
    del environs[missing]
    message = "rank zero was not found" if missing == 0 else "rank 1 of 3 did not arrive within 1 s"
    for ended in all_ranks(environs, "--timeout", "1"):
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith(f"rankwise: {message}")
        assert len(ended.stderr.splitlines()) == 1


def test_all_of_ranks_that_are_no_world() -> None:
    environs = world(2)
    environs[1]["WORLD_SIZE"] = "3"
    for ended in all_ranks(environs, "--timeout", "60"):
        assert ended.returncode == 1
        assert "start all with the same WORLD_SIZE" in ended.stderr


@pytest.mark.parametrize("how", ["dies", "raises"])
@pytest.mark.parametrize("last", [0, 2])
def test_all_with_a_rank_that_ends_before_its_report(how: str, last: int) -> None:
    environs = world(3)
    commands = [[RANKWISE, "env", "--all", "--timeout", "60"]] * 3
    commands[last] = [sys.executable, "-c", ENDS_LATE, how, *commands[last][1:]]
    ended = run_all(commands, environs)
    for rank, one in enumerate(ended):
        assert one.returncode != 0
        if rank != last:
            assert ("rank zero ended before it had the reports" if last == 0 else "rank 2 of 3 sent no report") in (
                one.stderr
            )
            assert len(one.stderr.splitlines()) == 1, one.stderr


def agent_world(size: int, port: int) -> list[dict[str, str]]:
    """Return the variables that torchrun's agent sets."""
    return [
        AGENT | {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        for rank in range(size)
    ]


@pytest.mark.slow
def test_all_over_the_store_of_an_agent() -> None:
    serving, port = store.serve(one_host=True, timeout=SECONDS)
    first, second = all_ranks(agent_world(2, port))
    assert (second.returncode, second.stdout) == (0, ""), second.stderr
    assert first.stdout.splitlines()[0].split() == ["rank", "local_rank"], first.stderr
    del serving


@pytest.mark.slow
def test_all_over_the_store_of_an_agent_without_a_rank() -> None:
    serving, port = store.serve(one_host=True, timeout=SECONDS)
    for ended in all_ranks(agent_world(3, port)[:2], "--timeout", "5"):
        assert ended.returncode == 1
        assert "rank 2 of 3 did not arrive within 5 s" in ended.stderr
        assert "Traceback" not in ended.stderr
    del serving


@pytest.mark.rare
def test_all_over_a_store_with_a_rank_that_dies_before_its_report() -> None:
    serving, port = store.serve(one_host=True, timeout=SECONDS)
    commands = [[RANKWISE, "env", "--all", "--timeout", "5"]] * 2
    commands[1] = [sys.executable, "-c", ENDS_LATE, "dies", *commands[1][1:]]
    first, _ = run_all(commands, agent_world(2, port))
    assert first.returncode == 1
    assert "rank 1 of 2 sent no report within 5 s" in first.stderr
    del serving


@pytest.mark.slow
def test_all_without_the_agents_store() -> None:
    for ended in all_ranks(agent_world(2, free_port()), "--timeout", "60"):
        assert ended.returncode == 1
        assert "no store at 127.0.0.1:" in ended.stderr
        assert "Traceback" not in ended.stderr
