"""Random host lists, as a real `scontrol show hostnames` expands them."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from rankwise._environment.hostlist import expand, first
from rankwise.errors import LauncherEnvironmentError
from tests.clusters.packages import why_not

TRIALS = 150


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file without which scontrol does not start; it asks no daemon."""
    reason = why_not({"scontrol": "slurm-client"})
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    path: Path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=c\nSlurmctldHost=localhost\nNodeName=n\nPartitionName=p Nodes=ALL\n")
    return str(path)


def hostnames(hostlist: str, configuration: str) -> list[str] | None:
    """Return the hosts that scontrol makes of a list; None if it refuses it."""
    ended = subprocess.run(
        ["scontrol", "show", "hostnames", hostlist],
        env=os.environ | {"SLURM_CONF": configuration},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return ended.stdout.split() if ended.returncode == 0 else None


def random_number(dice: random.Random) -> str:
    return str(dice.choice((0, 1, 7, 9, 10, 98, 99, 100, 999, 2047))).zfill(dice.choice((1, 1, 2, 3, 5)))


def random_range(dice: random.Random) -> str:
    lowest = random_number(dice)
    last = str(int(lowest) + dice.randrange(12)).zfill(len(lowest))
    return dice.choice((lowest, f"{lowest}-{last}"))


def random_name(dice: random.Random) -> str:
    name = dice.choice(("node", "gpu-", "r1n", "a", "login.x-", "n0"))
    for number in range(dice.choice((0, 1, 1, 1, 2, 3))):
        between = dice.choice(("c", "-", "n1x")) if number else ""
        name += f"{between}[{','.join(random_range(dice) for _ in range(dice.randint(1, 3)))}]"
    return name


@pytest.mark.slow
@pytest.mark.soak(20)
def test_a_list_is_expanded_as_scontrol_does(seed: int, configuration: str) -> None:
    dice = random.Random(seed)  # noqa: S311 - reproducible
    for _ in range(TRIALS):
        hostlist = ",".join(random_name(dice) for _ in range(dice.randint(1, 4)))
        expected = hostnames(hostlist, configuration)
        assert expected is not None, hostlist
        assert expand(hostlist) == expected, hostlist
        assert first(hostlist) == expected[0], hostlist


@pytest.mark.slow
@pytest.mark.soak(20)
def test_a_list_that_is_broken_gives_the_same_hosts_or_an_error(seed: int, configuration: str) -> None:
    dice = random.Random(seed)  # noqa: S311 - reproducible
    for _ in range(TRIALS):
        text = [*",".join(random_name(dice) for _ in range(2))]
        text[dice.randrange(len(text))] = dice.choice("[]-,x0")
        hostlist = "".join(text)
        if re.search(r"\][^\[\],]+(,|$)", hostlist):
            continue  # text after the last bracket, which Debian's Slurm does not expand: 24.11 does
        expected = hostnames(hostlist, configuration)
        try:
            found = expand(hostlist)
        except LauncherEnvironmentError:
            continue
        assert expected is None or found == expected, hostlist
