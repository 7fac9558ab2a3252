"""The static rendezvous of several launchers: a missing host, a duplicate node rank, a port in use."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import rankwise as rw
from rankwise.launching import Nodes
from tests.lanes import variants
from tests.session.worlds import clean_environ, free_port, garbage_thrown


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that another program listens on, and that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def launch_on(port: int, rank: int, *, most: int = 2, timeout: str = "2") -> list[int] | Exception:
    """Launch ranks that return their identity, as host `rank`, and return the results or the error."""
    nodes = Nodes(num_nodes=most, node_rank=rank, address=f"127.0.0.1:{port}", options={"timeout": timeout})
    try:
        return rw.launch(who_am_i, nproc=2, nodes=nodes)
    except rw.RankwiseError as error:
        return error


def who_am_i() -> int:
    with rw.init(timeout=100.0):
        return rw.all_reduce(1) * 10 + rw.get_rank()


def launch_all(*ranks: int, most: int = 2, timeout: str = "2") -> list[list[int] | Exception]:
    """Launch on several hosts at the same time, each in a thread of this process."""
    port = free_port()
    ended: dict[int, list[int] | Exception] = {}

    def be(place: int, rank: int) -> None:
        ended[place] = launch_on(port, rank, most=most, timeout=timeout)

    threads = [threading.Thread(target=be, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return [ended[place] for place in range(len(ranks))]


def test_ranks_of_two_hosts_are_one_world() -> None:
    assert launch_all(0, 1, timeout="100") == [[40, 41], [42, 43]]


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named() -> None:
    (error,) = launch_all(0, most=3)
    assert isinstance(error, rw.LaunchError)
    assert "hosts 1-2 of 3 did not connect to 127.0.0.1:" in str(error)
    assert "within 2 s" in str(error)


@pytest.mark.rare
def test_a_first_host_that_does_not_come_is_missed() -> None:
    (error,) = launch_all(1)
    assert isinstance(error, rw.LaunchError)
    assert "host 1 did not find host 0 within 2 s" in str(error)


@pytest.mark.slow
def test_a_port_that_is_taken_is_an_error_on_every_host(taken_port: int) -> None:
    first = launch_on(taken_port, 0)
    assert isinstance(first, rw.LaunchError)
    assert f"host 0 cannot listen on port {taken_port}" in str(first)
    # In a process of its own: a client of torch's store cannot be stopped on a port that is silent.
    command = [
        str(Path(sys.executable).with_name("rankwise")),
        "launch",
        "-n",
        "1",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
    ]
    second = subprocess.run(
        [*command, "--rdzv-endpoint", f"127.0.0.1:{taken_port}", "--rdzv-conf", "timeout=2", "--no-python", "true"],
        env=clean_environ(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    assert "rankwise: host 1 did not find host 0 within 2 s" in second.stderr
    assert "another program has the port" in second.stderr


@pytest.mark.slow
def test_two_hosts_with_one_node_rank_are_an_error() -> None:
    ended = launch_all(0, 1, 1, most=3, timeout="8")
    assert any("two launchers are host 1 of 3" in str(error) for error in ended)
    assert any("host 2 of 3 did not connect" in str(error) for error in ended)


@pytest.mark.rare
def test_the_report_after_ctrl_c_counts_the_ranks_of_all_hosts() -> None:
    port = free_port()
    command = [str(Path(sys.executable).with_name("rankwise")), "launch", "-n", "2", "--nnodes", "2"]
    program = str(Path(__file__).parent / "programs" / "fail_when_stopped.py")
    hosts = [
        subprocess.Popen(
            [*command, "--node-rank", str(host), "--rdzv-endpoint", f"127.0.0.1:{port}", program],
            env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in range(2)
    ]  # fmt: skip
    try:
        for host in hosts:
            assert host.stdout is not None
            assert ["ready" in host.stdout.readline() for _ in range(2)] == [True, True]
        hosts[1].send_signal(signal.SIGINT)
        report = hosts[1].communicate(timeout=200)[1]
        assert re.search(r"ranks? [23].* of 4 on .*ValueError: the checkpoint cannot be saved", report), report
    finally:
        for host in hosts:
            host.terminate()
            host.communicate(timeout=200)


@pytest.mark.parametrize("options", variants([{"timeout": "soon"}, {}], fast=[{}]))
def test_hosts_that_cannot_be_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(rw.InvalidArgumentError, match="no number of seconds" if options else "not one of 2 hosts"):
        nodes = Nodes(num_nodes=2, node_rank=0 if options else 2, address="127.0.0.1:1", options=options)
        rw.launch(who_am_i, nproc=1, nodes=nodes)


@pytest.mark.rare
@pytest.mark.soak(30)
def test_launchers_find_each_other_while_garbage_is_thrown_at_them(seed: int) -> None:
    with garbage_thrown(seed):
        assert launch_all(0, 1, timeout="100") == [[40, 41], [42, 43]]


@pytest.mark.slow
def test_a_stranger_who_raises_all_counters_of_the_store_does_not_keep_the_launchers(tmp_path: Path) -> None:
    """They would wait at the end for each other in C++, deaf to signals, for five minutes."""
    port, end = free_port(), threading.Event()
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)\n")

    def raise_counters() -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        with contextlib.suppress(RuntimeError):  # the launchers have ended
            while not end.wait(0.01):
                for key in store.list_keys():
                    with contextlib.suppress(RuntimeError, ValueError):
                        int(store.get(key))
                        store.add(key, 1 << 62)
                        store.add(key, 1 << 62)

    options = ["-n", "1", "--no-prefix", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "rankwise", "launch", *options]
    hosts = [
        subprocess.Popen(
            [*command, "--node-rank", str(host), str(script)],
            cwd=tmp_path, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in range(2)
    ]  # fmt: skip
    for host in hosts:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
    stranger = threading.Thread(target=raise_counters)
    stranger.start()
    time.sleep(0.5)
    (tmp_path / "go").touch()
    said = [host.communicate(timeout=100)[1] for host in hosts]
    end.set()
    stranger.join()
    assert [host.returncode for host in hosts] == [0, 0], said
