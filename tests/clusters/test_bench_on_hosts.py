"""`rankwise bench` on hosts that are network namespaces, one of them with a slow network."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from benchmarks.hosts import BIN, on_hosts
from tests.clusters.hosts import needs_namespaces

pytestmark = [
    needs_namespaces,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tc") is None, reason="tc is missing: no network can be made slow"),
]
RANK = "RANK=$HOST LOCAL_RANK=0 WORLD_SIZE={hosts} MASTER_ADDR=10.9.9.1 MASTER_PORT=29500"
# The rate of all links; much more is what the processors of this machine can do, beside other work on them.
USUAL = 400
THROTTLE = "if [ $HOST = {slow} ]; then rate={rate}; else rate={usual}; fi; "
THROTTLE += "tc qdisc add dev eth0 root tbf rate ${{rate}}mbit burst 64kb latency 400ms; "


def bench(folder: Path, args: str, *, hosts: int, slow: int = -1, rate: int = USUAL) -> str:
    """Run the command with a rank on each host, of which one sends slowly, and return what rank zero prints."""
    command = f"{BIN / 'rankwise'} bench {args} --timeout 100 > {folder}/out-$HOST; echo $? > {folder}/status-$HOST"
    on_hosts(folder, hosts, f"{THROTTLE.format(slow=slow, rate=rate, usual=USUAL)}{RANK.format(hosts=hosts)} {command}")
    out = (folder / "out-0").read_text()
    assert (folder / "status-0").read_text() == f"{int('SLOW' in out)}\n", (folder / "messages").read_text() + out
    return out


@pytest.mark.soak(20)
def test_a_host_that_sends_slowly_is_named_alone(tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)  # noqa: S311 - no secret
    hosts, rate = choice.randint(3, 5), choice.choice([25, 50, 100])
    slow = choice.randrange(hosts)
    out = bench(tmp_path, "--pairs", hosts=hosts, slow=slow, rate=rate)
    named = [line.split()[1] for line in out.splitlines() if line.startswith("SLOW")]
    assert named == [f"node{slow}"], out


@pytest.mark.rare
def test_hosts_with_equal_links_are_well(tmp_path: Path) -> None:
    out = bench(tmp_path, "--pairs", hosts=4)
    assert "SLOW" not in out
    assert out.splitlines()[-1].startswith("OK")


@pytest.mark.rare
def test_between_hosts_the_limit_is_their_link(tmp_path: Path) -> None:
    out = bench(tmp_path, "all_reduce --minbytes 1M --maxbytes 1M --seconds 0.1", hosts=2, slow=1, rate=100)
    *_, last = out.splitlines()
    limit = float(last.split()[-1])
    assert limit == pytest.approx(100 / 8e3, rel=0.3), out  # a rate that the kernel keeps, and no measured speed
