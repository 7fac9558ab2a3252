"""Rule 9 on a host whose name does not resolve to loopback, where gloo would listen for the whole network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.worlds import PROGRAMS, clean_environ, free_port, plain

HERE = Path(__file__).parent
LISTENERS = str(PROGRAMS / "listeners.py")
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "mount", "hostname"))),
    reason="not root, or no unshare, ip, mount or hostname: a network namespace cannot be made",
)


def on_far_host(tmp_path: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.9.9.9 far\n")
    return subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "sh", str(HERE / "far_host.sh"), str(hosts), *command],
        env=clean_environ(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def addresses(process: subprocess.Popen[str]) -> set[str]:
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    return set(out.split())


@pytest.mark.rare
def test_the_host_is_far(tmp_path: Path) -> None:
    """By default gloo listens on an address of the network, and the tests below would find such a listener."""
    program = (
        "import os, psutil, torch.distributed as d;"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1);"
        "print(*{c.laddr.ip for c in psutil.net_connections('tcp') if c.pid == os.getpid() and c.status == 'LISTEN'});"
        "d.destroy_process_group()"
    )
    assert addresses(on_far_host(tmp_path, sys.executable, "-c", program)) == {"10.9.9.9"}


@pytest.mark.slow
def test_hand_set_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    shell = 'for rank in 0 1 2; do RANK=$rank "$@" & done; wait'
    variables = plain(0, 3, free_port())
    found = addresses(on_far_host(tmp_path, "sh", "-c", shell, "sh", sys.executable, LISTENERS, **variables))
    assert found
    assert found <= LOOPBACK


@pytest.mark.slow
def test_launched_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    rankwise = str(Path(sys.executable).with_name("rankwise"))
    found = addresses(
        on_far_host(tmp_path, rankwise, "launch", "-n", "2", "--no-prefix", LISTENERS, TMPDIR=str(tmp_path))
    )
    assert found
    assert found <= LOOPBACK


@pytest.mark.rare
def test_alone_listens_on_loopback_only(tmp_path: Path) -> None:
    found = addresses(on_far_host(tmp_path, sys.executable, LISTENERS))
    assert found <= LOOPBACK


@pytest.mark.rare
def test_a_rank_that_waits_is_not_connected_to_itself() -> None:
    """As may happen where rank zero's port is in the range from which connections get theirs; it has then to wait."""
    port = 35118
    ranks = """
    ip link set lo up
    echo "35100 35159" > /proc/sys/net/ipv4/ip_local_port_range
    code='import rankwise as rw; rw.init(timeout=60, device="cpu"); print(rw.all_reduce(1))'
    RANK=1 "$0" -c "$code" &
    sleep 4
    RANK=0 "$0" -c "$code"
    wait
    """
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ended = subprocess.run(
        ["unshare", "--net", "bash", "-c", ranks, sys.executable],
        env=clean_environ(**variables), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.stdout.split() == ["2", "2"], ended.stderr
