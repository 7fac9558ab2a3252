"""The address of rank zero, from the file of hosts that a scheduler names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankwise._environment.detect import detect
from rankwise._session.environ import with_first_host
from rankwise.errors import LauncherEnvironmentError
from tests.session.worlds import run_ranks

PALS = {"PALS_RANKID": "0", "PALS_NRANKS": "2", "PALS_APID": "a-1"}
JSRUN = {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2", "LSB_JOBID": "7"}


@pytest.mark.parametrize(
    ("variables", "text", "host"),
    [
        (PALS, "node7\nnode8\n", "node7 (from line 1 of PBS_NODEFILE)"),
        (PALS, "node7.site.example", "node7.site.example (from line 1 of PBS_NODEFILE)"),
        (JSRUN, "batch1\nnode7\nnode7\nnode8\n", "node7 (from line 2 of LSB_DJOB_RANKFILE)"),
        (JSRUN, "batch1\r\n  10.0.0.7 42\r\n", "10.0.0.7 (from line 2 of LSB_DJOB_RANKFILE)"),
        (JSRUN, "batch1\nfd00::7\n", "fd00::7 (from line 2 of LSB_DJOB_RANKFILE)"),
    ],
)
def test_the_first_host_is_read(variables: dict[str, str], text: str, host: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    name = "PBS_NODEFILE" if variables is PALS else "LSB_DJOB_RANKFILE"
    reading = detect(variables | {name: str(path)})
    assert reading.host is None, "the reader is pure"
    assert str(with_first_host(reading).host) == host


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: "),
        (b"", "line 2 of LSB_DJOB_RANKFILE=.* is '', not a host"),
        (b"batch1\n", "is '', not a host"),
        (b"batch1\n-oProxyCommand=x\n", "is '-oProxyCommand=x', not a host"),
        (b"batch1\nrank 0=node7 slot=0,\n", "is 'rank 0=node7 slot=0,', not a host"),
        (b"batch1\n" + b"n" * 5000, "not a host"),
        (b"batch1\n\xff\xfe\n", "cannot be read: "),
    ],
)
def test_a_file_without_a_host_is_an_error_that_names_it(content: bytes | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    reading = detect(JSRUN | {"LSB_DJOB_RANKFILE": str(path)})
    with pytest.raises(LauncherEnvironmentError, match=problem) as caught:
        with_first_host(reading)
    assert "LSB_DJOB_RANKFILE" in str(caught.value)
    assert "set MASTER_ADDR" in str(caught.value)


@pytest.mark.parametrize("path", ["/", "\0", "/dev/null"])
def test_a_path_that_is_no_file_of_hosts_is_an_error(path: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match="PBS_NODEFILE"):
        with_first_host(detect(PALS | {"PBS_NODEFILE": path}))


@pytest.mark.parametrize(
    "more",
    [{"MASTER_ADDR": "node0"}, {"PALS_LOCAL_SIZE": "2"}, {"PALS_NRANKS": "1"}],
    ids=["an address", "one host", "one rank"],
)
def test_the_file_is_not_opened_where_its_host_is_not_needed(more: dict[str, str]) -> None:
    reading = detect(PALS | {"PBS_NODEFILE": "/nowhere"} | more)
    assert with_first_host(reading) is reading


def test_ranks_meet_at_the_host_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost\nlocalhost\n")
    ranks = run_ranks("join.py", [PALS | {"PALS_RANKID": str(rank), "PBS_NODEFILE": str(path)} for rank in range(2)])
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    joined = [json.loads(rank.stdout) for rank in ranks]
    assert [(one["rank"], one["local_rank"], one["num_nodes"], one["total"]) for one in joined] == [
        (0, 0, 1, 2),
        (1, 1, 1, 2),
    ]


def test_ranks_without_the_file_raise_at_once() -> None:
    ranks = run_ranks("join.py", [PALS | {"PALS_RANKID": str(rank), "PBS_NODEFILE": "/nowhere"} for rank in range(2)])
    for rank in ranks:
        assert rank.returncode == 1
        assert "LauncherEnvironmentError: PBS_NODEFILE='/nowhere' cannot be read" in rank.stderr
