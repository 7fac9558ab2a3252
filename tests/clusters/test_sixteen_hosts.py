"""128 ranks on 16 hosts that are network namespaces, with a launcher on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.hosts import BIN, STATIC, on_hosts
from tests.clusters.hosts import needs_namespaces

PROGRAM = Path(__file__).parents[1] / "session" / "programs" / "many_hosts.py"
HOSTS = 16
ALL_ENDED = 'until [ "$(ls {folder} | grep -c ended-)" = {hosts} ]; do sleep 0.1; done'
PROCESSES = "for each in /proc/[0-9]*; do readlink $each/exe; done | grep python > {folder}/left"


@needs_namespaces
@pytest.mark.rare
@pytest.mark.timeout(400)
def test_128_ranks_on_16_namespaces(tmp_path: Path) -> None:
    """A rank that differs, fails, is late or is killed is named by all others, and nothing is left behind."""
    out = tmp_path / "out"
    out.mkdir()
    launch = f"{BIN / 'rankwise'} launch -n 8 {STATIC.format(hosts=HOSTS)} {PROGRAM} > {out}/$HOST 2>&1"
    look = f"{ALL_ENDED}; sleep 2; {PROCESSES}".format(folder=tmp_path, hosts=HOSTS)
    on_hosts(tmp_path, HOSTS, f"{launch}; echo $? > {tmp_path}/ended-$HOST; if [ $HOST = 0 ]; then {look}; fi")
    outputs = [(out / str(host)).read_text() for host in range(HOSTS)]
    # A rank prints nothing but what it has found otherwise than expected; the first one, what it has found at all.
    lines = [line.partition("] ") for output in outputs for line in output.splitlines() if line.startswith("[")]
    lines = [line for line in lines if not line[2].startswith("[W")]  # torch warns of addresses without names
    found = [text for rank, _, text in lines if rank.strip("[ ") == "0"]
    expected = ["joined", "15 connections at most", "mismatch", "one rank", "1 missing", "64 missing", "dead"]
    assert found == expected, outputs
    assert not [text for rank, _, text in lines if rank.strip("[ ") != "0"], outputs
    assert "rank 65 of 128 on node8 was killed by SIGKILL" in outputs[0]
    assert (tmp_path / "left").read_text() == ""
    ended = {f"ended-{host}" for host in range(HOSTS)}
    assert {path.name for path in tmp_path.iterdir()} == {"out", "hosts", "resolv.conf", "messages", "left"} | ended
