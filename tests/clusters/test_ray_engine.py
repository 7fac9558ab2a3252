"""`launch(on="ray")` on a real cluster of Ray with two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lanes import variants
from tests.session.worlds import clean_environ

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parent / "programs" / "on_engine.py")
# In a process of its own: Ray changes signal handlers, and leaves threads.
CLUSTER = """
import ray
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
node = cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
while (line := input()) == "remove":
    cluster.remove_node(node, allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""


class RayCluster:
    """A cluster, in another process."""

    def __init__(self, process: subprocess.Popen[str], folder: str) -> None:
        self._process = process
        self.folder = folder
        self.address = self._read()

    def remove_node(self) -> None:
        self._tell("remove")
        assert self._read() == "removed"

    def end(self) -> None:
        self._tell("end")
        self._process.communicate(timeout=100)

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("removed", "127.", "1", "2")) and " " not in line.strip():
                return line.strip()
        raise AssertionError("the cluster has ended")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray")
    # Short: the paths of its sockets have to fit into 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env=clean_environ(RAY_TMPDIR=folder, TMPDIR=folder),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        cluster = RayCluster(process, folder)
        try:
            yield cluster
        finally:
            cluster.end()


def environ(cluster: RayCluster) -> dict[str, str]:
    return clean_environ(RAY_ADDRESS=cluster.address, RAY_TMPDIR=cluster.folder, TMPDIR=cluster.folder)


def run(cluster: RayCluster, *words: str) -> Any:
    ended = subprocess.run(
        [sys.executable, PROGRAM, "ray", *words],
        env=environ(cluster), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return next(json.loads(line) for line in ended.stdout.splitlines() if line.startswith(("{", "[[")))


def test_the_numbers_are_those_of_a_launch_on_this_host(ray_cluster: RayCluster) -> None:
    command = [sys.executable, PROGRAM, "none", "digits"]
    here = subprocess.run(command, env=environ(ray_cluster), capture_output=True, text=True, timeout=200, check=True)
    assert run(ray_cluster, "digits") == json.loads(here.stdout.splitlines()[-1])


FAILURES = [("raise", 1, "raised ValueError: no data"), ("kill", -signal.SIGKILL, "was killed by SIGKILL")]


@pytest.mark.parametrize(
    ("how", "exitcode", "message"),
    variants(FAILURES, slow=FAILURES[:1]),
)
def test_a_rank_fails(ray_cluster: RayCluster, how: str, exitcode: int, message: str) -> None:
    error = run(ray_cluster, how)
    assert (error["kind"], error["rank"], error["exitcode"]) == ("RankFailedError", 2, exitcode)
    assert message in error["message"]


def start(cluster: RayCluster, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start ranks that wait, and return the launching process and their processes, by rank."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "ray", "wait", str(folder)],
        env=environ(cluster), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 150
    while len(paths := sorted(folder.glob("*.*"))) < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process, [int(path.suffix[1:]) for path in paths]


def assert_ended(ranks: list[int]) -> None:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)], timeout=60)
    assert not alive


@pytest.mark.rare
def test_ctrl_c_ends_the_actors(ray_cluster: RayCluster, tmp_path: Path) -> None:
    process, ranks = start(ray_cluster, tmp_path)
    actors = [psutil.Process(pid).ppid() for pid in ranks]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert "KeyboardInterrupt" in errors
    assert_ended([*ranks, *actors])


def test_an_actor_is_killed(ray_cluster: RayCluster, tmp_path: Path) -> None:
    process, ranks = start(ray_cluster, tmp_path)
    os.kill(psutil.Process(ranks[3]).ppid(), signal.SIGKILL)
    out, _ = process.communicate(timeout=100)
    error = next(json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert (error["kind"], error["rank"]) == ("RankFailedError", 3)
    assert "was lost: its actor has ended" in error["message"]
    assert_ended(ranks)


@pytest.mark.rare
def test_a_node_is_removed(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """The last test: the node is gone after it."""
    process, ranks = start(ray_cluster, tmp_path)
    ray_cluster.remove_node()
    out, _ = process.communicate(timeout=100)
    error = next(json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert error["kind"] == "RankFailedError"
    assert "was lost" in error["message"]
    assert "Ray's node" in error["host"]
    assert_ended(ranks)
