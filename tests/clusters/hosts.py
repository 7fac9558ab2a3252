"""Programs on two hosts that are network namespaces, and the truth about where their ranks ran."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rankwise._environment.facts import TOPOLOGY_FIELDS
from tests.session.worlds import clean_environ

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
RSH = str(HERE / "rsh.sh")
SHOW = [str(BIN / "rankwise"), "env", "--all", "--json", "--timeout", "100"]
PLACED = str(HERE / "programs" / "placed.py")
NEEDED = ("unshare", "nsenter", "ip", "mount", "hostname")
NAMES = "127.0.0.1 localhost\n10.9.9.1 left\n10.9.9.2 right\n"

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NEEDED)),
    reason=f"not root, or one of {', '.join(NEEDED)} is missing: network namespaces cannot be made",
)


def on_two_hosts(
    folder: Path, shell: str, *args: str, names: str = NAMES, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on two hosts; HOST is 0 on one and 1 on the other. Their names are those of /etc/hosts."""
    hosts, resolver = folder / "hosts", folder / "resolv.conf"
    hosts.write_text(names)
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")  # refuses at once
    spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    script = ["sh", str(HERE / "two_hosts.sh"), str(hosts), str(resolver)]
    return subprocess.run(
        ["unshare", *spaces, *script, "sh", "-c", shell, "sh", *args],
        env=clean_environ(TMPDIR=str(folder), PYTHON=sys.executable) | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def from_left(
    folder: Path, command: Sequence[str], *, names: str = NAMES, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a launcher on the first host, which starts processes on both; the other waits for its end."""
    end = str(folder / "ended")
    shell = 'ended=$1; shift; if [ $HOST = 1 ]; then until [ -e "$ended" ]; do sleep 0.1; done; exit; fi; '
    shell += 'until [ "$(nsenter --target $RIGHT --uts hostname)" = right ]; do sleep 0.02; done; '
    shell += '"$@"; status=$?; : > "$ended"; exit $status'
    return on_two_hosts(folder, shell, end, *command, names=names, **variables)


def places(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return the output of the ranks of `placed.py`, in their order."""
    assert ended.returncode == 0, ended.stderr + ended.stdout
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda place: place["rank"])


def check_places(found: Sequence[dict[str, Any]], hosts: Sequence[str]) -> None:
    """Check the topology against the truth: which process ran on which host."""
    assert [place["host"] for place in found] == list(hosts)
    check_topology(found, hosts)
    nodes = _ranks_of_nodes(hosts)
    for place in found:
        mine = nodes[place["node_rank"]]
        position = mine.index(place["rank"])
        assert place["total"] == len(hosts)
        assert place["node"] == mine
        assert place["across"] == sorted(ranks[position] for ranks in nodes if position < len(ranks))


def check_reports(out: str, launcher: str, hosts: Sequence[str]) -> None:
    """Check the output of `rankwise env --all --json`, which needs no torch, against the truth."""
    ranks = json.loads(out)["ranks"]
    assert [one["launcher"] for one in ranks] == [launcher] * len(hosts)
    assert [one["host"]["hostname"]["value"] for one in ranks] == list(hosts)
    check_topology([topology_of(one) for one in ranks], hosts)


def topology_of(report: dict[str, Any]) -> dict[str, int]:
    """Return the numbers in the report of a rank."""
    return {name: report["facts"][name]["value"] for name in TOPOLOGY_FIELDS}


def check_topology(found: Sequence[dict[str, Any]], hosts: Sequence[str]) -> None:
    """Check the numbers of all ranks, given their hosts; a launcher may number the ranks of a host in any order."""
    nodes = _ranks_of_nodes(hosts)
    names = list(dict.fromkeys(hosts))
    for rank, place in enumerate(found):
        mine = nodes[names.index(hosts[rank])]
        assert (place["rank"], place["world_size"]) == (rank, len(hosts))
        assert (place["local_world_size"], place["num_nodes"]) == (len(mine), len(nodes))
        assert place["node_rank"] == names.index(hosts[rank])
    for ranks in nodes:
        assert sorted(found[rank]["local_rank"] for rank in ranks) == list(range(len(ranks)))


def _ranks_of_nodes(hosts: Sequence[str]) -> list[list[int]]:
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
