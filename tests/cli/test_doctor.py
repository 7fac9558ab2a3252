"""`rankwise doctor`: each fault is named by its check and by no other, and a world without one has no line but OK."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankwise._doctor import facts
from rankwise._doctor.checks import CHECKS, Finding, examine
from rankwise._doctor.facts import Facts, Link
from rankwise._doctor.probes import connect
from rankwise._environment.detect import detect
from rankwise._net.json_lines import decode_line, encode_line
from rankwise.errors import RankwiseError
from tests.cli.test_env_command import RANKWISE, SECONDS
from tests.cli.test_env_ranks import run_all, world
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data"
FREE = 1 << 40
# A rank that stops itself when the ranks have met, and before they join.
STOPS = (
    "import os, signal\n"
    "from rankwise._doctor import probes\n"
    "from rankwise.cli.main import main\n"
    "probes.join_and_probe = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)\n"
    "main()\n"
)


def fit(**changes: Any) -> Facts:
    """Return facts collected here, but with enough of what a machine for tests may not have."""
    here = facts.collect(rank=0, warnings=(), rank_zero="", environ={"OMP_NUM_THREADS": "1"})
    folders = tuple(replace(folder, free=FREE) for folder in here.folders)
    enough: dict[str, Any] = dict.fromkeys(("files", "locked_memory", "processes", "memory", "shared_memory"), FREE)
    enough |= {"cores": tuple(range(8)), "host_cores": 8, "quota": None, "folders": folders, "reverse_seconds": 0.0}
    return replace(here, **enough | changes)


def fit_world() -> list[Facts]:
    """Return the facts of two hosts, each with two ranks."""
    here = fit(names=("10.9.9.1",), names_problem="")
    return [
        replace(here, rank=rank, host=f"node{rank // 2}", host_id=f"{rank // 2}", address=f"10.9.9.{rank // 2}")
        for rank in range(4)
    ]


def found_in(ranks: Sequence[Facts], links: Sequence[Link] = ()) -> list[Finding]:
    """Return the findings that are not OK."""
    return [one for one in examine(ranks, links) if one.level != "OK"]


def folder(index: int, **changes: Any) -> Callable[[Facts], Facts]:
    def change(one: Facts) -> Facts:
        folders = list(one.folders)
        folders[index] = replace(folders[index], **changes)
        return replace(one, folders=tuple(folders))

    return change


def fact(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda one: replace(one, **changes)


# The check, the level, the fault, and the ranks that have it.
FAULTS: list[tuple[str, str, Callable[[Facts], Facts], tuple[int, ...]]] = [
    ("variables", "WARN", fact(warnings=("RANKWISE_TYPO is set",)), (1,)),
    ("interfaces", "FAIL", fact(variables=("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=nosuch")), (1, 2)),
    ("interfaces", "WARN", fact(variables=("OMP_NUM_THREADS=1", "NCCL_SOCKET_IFNAME=nosuch,other")), (1,)),
    ("interfaces", "FAIL", fact(variables=("OMP_NUM_THREADS=1", "NCCL_IB_HCA=mlx5_9:1"), gpus=1), (1,)),
    ("visible devices", "FAIL", fact(variables=("OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES=0,2"), gpus=2), (0, 3)),
    ("devices", "FAIL", fact(device="cuda:0", device_id="GPU-1"), (0, 1, 2, 3)),
    ("devices", "FAIL", fact(device="cuda:0", device_id=""), (2,)),
    ("devices", "FAIL", fact(device_problem="local rank 1 has no device"), (1,)),
    ("versions", "FAIL", lambda one: replace(one, versions=(*one.versions[:2], "torch=2.0.0")), (3,)),
    ("names", "WARN", fact(names=(), names_problem="Name or service not known"), (0, 1)),
    ("names", "WARN", fact(forward_seconds=3.0), (0, 1)),
    ("reverse names", "WARN", fact(reverse_seconds=3.0), (2, 3)),
    ("loopback", "WARN", fact(names=("127.0.1.1",)), (0, 1)),
    ("addresses", "FAIL", fact(address="172.17.0.1", interface="docker0"), (0, 1, 2, 3)),
    ("open files", "FAIL", fact(files=36), (0, 1)),
    ("open files", "WARN", fact(files=256), (0, 1)),
    ("locked memory", "FAIL", fact(adapters=("mlx5_0",), locked_memory=1 << 16), (0, 1, 2, 3)),
    ("processes", "FAIL", fact(processes=20), (0, 1)),
    ("shared memory", "WARN", fact(shared_memory=1 << 26), (0, 1)),
    ("shared memory", "FAIL", fact(shared_memory=None), (0, 1)),
    ("memory", "FAIL", fact(memory=1 << 27), (0, 1)),
    ("threads", "WARN", fact(variables=("OMP_NUM_THREADS=8",)), (2, 3)),
    ("threads", "WARN", fact(variables=()), (2, 3)),
    ("affinity", "WARN", fact(cores=(3,), variables=("OMP_NUM_THREADS=1",)), (2, 3)),
    ("full folders", "FAIL", folder(1, free=0), (1,)),
    ("full folders", "WARN", folder(0, free=1 << 27), (1,)),
    ("full folders", "FAIL", folder(0, problem="it has no inodes left"), (1,)),
    ("full folders", "FAIL", folder(1, problem="no answer within 3 s"), (1,)),
    ("different folders", "WARN", folder(0, kind="nfs4"), (3,)),
]
LINKS: list[tuple[str, str, list[Link], tuple[int, ...]]] = [
    (
        "ports",
        "FAIL",
        [Link(source=0, target=2, problem="port 5: refused"), Link(source=2, target=0)],
        (2,),
    ),
    ("clocks", "WARN", [Link(source=2, target=0, offset=-90.0), Link(source=0, target=2, offset=90.0)], (2,)),
]


def test_a_fit_world_has_no_fault() -> None:
    links = [Link(source=0, target=2, offset=0.2), Link(source=2, target=0, offset=-0.2)]
    assert found_in(fit_world(), links) == []
    assert [one.check for one in examine(fit_world(), links)] == list(CHECKS)


def test_each_check_has_a_fault() -> None:
    assert {row[0] for row in (*FAULTS, *LINKS)} == {*CHECKS}


@each_row(("check", "level", "inject", "ranks"), FAULTS)
def test_a_fault_is_named_with_its_ranks(
    check: str, level: str, inject: Callable[[Facts], Facts], ranks: tuple[int, ...]
) -> None:
    faulty = [inject(one) if one.rank in ranks else one for one in fit_world()]
    found = [one for one in found_in(faulty) if (check, one.check) != ("affinity", "threads")]  # a consequence
    assert {(one.check, one.level) for one in found} == {(check, level)}
    assert ranks in {one.ranks for one in found}
    assert all(one.remedy for one in found)
    assert {host for one in found for host in one.hosts} == {f"node{rank // 2}" for rank in ranks}


@each_row(("check", "level", "links", "ranks"), LINKS)
def test_a_fault_between_hosts_is_named(check: str, level: str, links: list[Link], ranks: tuple[int, ...]) -> None:
    (found,) = found_in(fit_world(), links)
    assert (found.check, found.level, found.ranks) == (check, level, ranks)


def test_the_host_at_fault_is_named_and_not_those_that_cannot_reach_it() -> None:
    bad = [Link(source=source, target=2, problem="timed out") for source in (0, 4, 6)]
    hosts = [replace(one, rank=rank, host=f"node{rank // 2}", host_id=f"{rank // 2}", address=f"10.9.9.{rank // 2}")
             for rank, one in enumerate([*fit_world(), *fit_world()])]  # fmt: skip
    assert {one.hosts for one in found_in(hosts, bad)} == {("node1",)}


def test_recorded_environments_have_no_fault() -> None:
    checked = 0
    here = fit(gpus=8)
    for path in sorted(DATA.glob("*/*.json")):
        for process, environ in json.loads(path.read_text()).items():
            with contextlib.suppress(RankwiseError):  # the environment of a shell, in which init() fails, too
                reading = detect(environ)
                variables = facts.compared(environ | {"OMP_NUM_THREADS": "1"})
                one = replace(here, warnings=reading.warnings, variables=variables)
                # Some are of launchers that have left something out, of which detect() warns.
                assert [found.text for found in found_in([one])] == [*reading.warnings], (path, process)
                checked += 1
    assert checked > 100


def test_facts_are_a_line() -> None:
    here = fit()
    assert decode_line(Facts, encode_line(here)) == here


def test_a_closed_port_is_named() -> None:
    link = connect(0, 1, free_port(), ("127.0.0.1",))
    assert link.problem.endswith("Connection refused")
    assert connect(0, 1, 1, ()).problem == "port 1 of no address"


def doctor(*args: str, before: Callable[[], object] | None = None, cwd: Path | None = None, **variables: str) -> Any:
    """Run the command to its end, and return the findings that are not OK; the exit status has to agree."""
    ended = subprocess.run(
        [RANKWISE, "doctor", "--json", *args],
        env=clean_environ(**variables),
        preexec_fn=before,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return bad_of(ended)


def bad_of(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert ended.stdout, ended.stderr
    found = json.loads(ended.stdout)["findings"]
    assert ended.returncode == any(one["level"] == "FAIL" for one in found), ended.stderr
    return [one for one in found if one["level"] != "OK"]


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def on_one_cpu() -> None:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


REAL: list[tuple[str, str, dict[str, Any]]] = [
    ("open files", "a process may open 64 files", {"before": limited}),
    ("interfaces", "there is no nosuch", {"GLOO_SOCKET_IFNAME": "nosuch"}),
    ("variables", "WORLD_SIZE is not set", {"RANK": "1"}),
    ("variables", "unset LOCAL_RANK", {"LOCAL_RANK": "1"}),
    ("variables", "did you mean RANKWISE_CHECK?", {"RANKWISE_CHEC": "1"}),
    ("visible devices", "CUDA_VISIBLE_DEVICES=63", {"CUDA_VISIBLE_DEVICES": "63"}),
    ("full folders", "No such file or directory", {"TMPDIR": "/nosuch"}),
    ("affinity", "alone", {"before": on_one_cpu}),
]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one CPU")
@each_row(("check", "text", "fault"), REAL)
def test_a_real_fault_is_named_alone(check: str, text: str, fault: dict[str, Any]) -> None:
    found = doctor(**fault)
    assert [one["check"] for one in found] == [check], found
    assert text in found[0]["text"]


def test_a_process_alone_is_fit() -> None:
    ended = subprocess.run([RANKWISE, "doctor"], env=clean_environ(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["OK"] * len(CHECKS)


@pytest.mark.parametrize("size", variants([2, 4], fast=[2], slow=[]))
def test_ranks_started_here_are_fit(size: int) -> None:
    shared = size > len(os.sched_getaffinity(0))
    assert [one["check"] for one in doctor("-n", str(size))] == ["threads"] * shared


@pytest.mark.slow
def test_ranks_that_differ_are_named_once(tmp_path: Path) -> None:
    environs = world(3)
    environs[1]["CUDA_VISIBLE_DEVICES"] = environs[2]["CUDA_VISIBLE_DEVICES"] = "63"
    environs[2]["GLOO_SOCKET_IFNAME"] = "nosuch"
    file = tmp_path / "failing-hosts.txt"
    command = [RANKWISE, "doctor", "--timeout", "60", "--failing-hosts", str(file)]
    first, *others = run_all([command] * 3, environs)
    lines = [line for line in first.stdout.splitlines() if line.startswith(("FAIL", "WARN"))]
    assert first.returncode == 1
    assert any(line.startswith("FAIL  interfaces         rank 2 on ") for line in lines), first.stdout
    assert any(line.startswith("WARN  visible devices    ranks 1-2 on ") for line in lines), first.stdout
    assert any(line.startswith("FAIL  join") and "rank 2" in line for line in lines), first.stdout
    assert file.read_text() == f"{os.uname().nodename}\n"
    assert all(other.returncode == 1 for other in others)


@contextlib.contextmanager
def stopped_rank(command: Sequence[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=clean_environ(**environ), stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_is_stopped_before_it_arrives_is_named() -> None:
    environs = world(3)
    command = [RANKWISE, "doctor", "--timeout", "3"]
    with stopped_rank(command, environs[1]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        first, third = run_all([command] * 2, [environs[0], environs[2]])
    assert "FAIL  join               rank 1 of 3 did not arrive within 3 s" in first.stdout
    assert (first.returncode, third.returncode, third.stdout) == (1, 1, "")


@pytest.mark.slow
def test_a_rank_that_is_stopped_after_it_has_arrived_is_named() -> None:
    environs = world(2)
    args = ["doctor", "--timeout", "8"]
    with stopped_rank([sys.executable, "-c", STOPS, *args], environs[1]):
        (first,) = run_all([[RANKWISE, *args]], environs[:1])
    assert "FAIL  join               rank 1 of 2 did not arrive within 8 s" in first.stdout
    assert first.returncode == 1


@pytest.mark.rare
def test_a_stopped_rank_of_a_launch_is_named_and_ended() -> None:
    program = "import os, signal, sys; os.environ['RANK'] != '1' or os.kill(os.getpid(), signal.SIGSTOP); "
    program += "from rankwise.cli.main import main; main()"
    command = [RANKWISE, "launch", "-n", "3", "--no-prefix", "--no-python", sys.executable, "-c", program]
    ended = subprocess.run(
        [*command, "doctor", "--timeout", "5"],
        env=clean_environ(), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert "rank 1 of 3 did not arrive within 5 s" in ended.stdout
    assert ended.returncode == 1


def test_a_file_that_cannot_be_written_is_an_error() -> None:
    ended = subprocess.run(
        [RANKWISE, "doctor", "--failing-hosts", "/nosuch/file"],
        env=clean_environ(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr == "rankwise: --failing-hosts /nosuch/file: No such file or directory\n"
