"""Several hosts, which are network namespaces of this one, with two ranks each: beside torchrun and gloo.

    python -m benchmarks.hosts [--rounds 3] [--only start,cut,crowd,collectives]

`start`: from the command to the first all_reduce of all ranks, and from a failure of the last rank to the end of all
launchers. `cut`: from the loss of the second host to the end on each side. `crowd`: how long the last rank takes to
join while others have opened a thousand connections to each port. `collectives`: small ones. Both sides
alternate in one run, with the same program. Needs root. Prints medians, and the load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.session.worlds import clean_environ

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent / "programs"
STRANGERS = Path(__file__).parents[1] / "tests" / "clusters" / "programs" / "crowd.py"
CROWD = 1000
TIMEOUT = 5
# torchrun's launcher on the side that is cut off has to be killed.
LONGEST = 60
COMMANDS = {
    "rankwise launch": f"{BIN / 'rankwise'} launch -n 2 --no-prefix",
    "torchrun": f"{BIN / 'torchrun'} --nproc-per-node 2",
}
STATIC = "--nnodes {hosts} --node-rank $HOST --master-addr node0 --master-port 29500"
C10D = "--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint node0:29400"
Measure = Callable[[str, int], tuple[float, ...]]


def on_hosts(folder: Path, hosts: int, shell: str) -> None:
    """Run a line of shell on so many hosts."""
    names = "".join(f"10.9.9.{host + 1} node{host}\n" for host in range(hosts))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [shutil.which("unshare") or "unshare", *spaces, "sh", str(HERE / "hosts.sh"), str(hosts), str(folder)]
    with (folder / "messages").open("w") as messages:
        subprocess.run(
            [*command, shell],
            env=clean_environ(TMPDIR=str(folder), OMP_NUM_THREADS="1", RANKWISE_SECRET="0123456789abcdef" * 4),
            stdout=subprocess.DEVNULL,
            stderr=messages,
            timeout=300,
            check=False,
        )


def times(folder: Path, pattern: str) -> list[float]:
    """Return the times that were noted in files."""
    return [float(path.read_text()) for path in sorted(folder.glob(pattern))]


def started(launcher: str, hosts: int) -> tuple[float, ...]:
    """Return the seconds to the first all_reduce, and from a failure to the end."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        command = f"{COMMANDS[launcher]} {STATIC.format(hosts=hosts)} {HERE / 'on_hosts.py'} fail {folder} 60"
        on_hosts(folder, hosts, f"date +%s.%N > {folder}/start-$HOST; {command}; date +%s.%N > {folder}/end-$HOST")
        (fault,) = times(folder, "fault")
        first = max(times(folder, "first-*")) - max(times(folder, "start-*"))
        return first, max(times(folder, "end-*")) - fault


def cut(meet: str, launcher: str, hosts: int) -> tuple[float, ...]:
    """Return the seconds from the loss of the second host to the end on the first host, and on the second."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        command = f"{COMMANDS[launcher]} {meet.format(hosts=hosts)} {HERE / 'on_hosts.py'} cut {folder} {TIMEOUT}"
        lose = f"until [ -e {folder}/first-3 ]; do sleep 0.1; done; ip link set eth0 down; date +%s.%N > {folder}/fault"
        shell = f"timeout -s KILL 90 {command} & launcher=$!; if [ $HOST = 1 ]; then {lose}; "
        # A launcher that does not end is killed with its ranks.
        shell += f"(sleep {LONGEST}; kill -9 -1) & fi; wait $launcher; date +%s.%N > {folder}/end-$HOST; "
        shell += f"until [ -e {folder}/end-0 ] && [ -e {folder}/end-1 ]; do sleep 0.1; done; kill -9 -1"
        on_hosts(folder, hosts, shell)
        (fault,) = times(folder, "fault")
        ends = [times(folder, f"end-{host}") for host in range(2)]
        return tuple(end[0] - fault if end else float("inf") for end in ends)


def table(title: str, columns: Sequence[str], sizes: Sequence[int], measure: Measure, rounds: int) -> None:
    """Measure both launchers alternately, and print medians."""
    print(f"\n{title}\n\n| hosts | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}", flush=True)
    for hosts in sizes:
        found: dict[str, list[tuple[float, ...]]] = {launcher: [] for launcher in COMMANDS}
        for _ in range(rounds):
            for launcher in COMMANDS:
                found[launcher].append(measure(launcher, hosts))
        cells = []
        for column in range(len(columns) // 3):
            own, theirs = (statistics.median(each[column] for each in found[launcher]) for launcher in COMMANDS)
            cells += [shown(own), shown(theirs), "" if theirs == float("inf") else f"{own / theirs:.2f}"]
        print(f"| {hosts} | {' | '.join(cells)} |", flush=True)


def shown(seconds: float) -> str:
    return f"over {LONGEST} s" if seconds == float("inf") else f"{seconds:.2f} s"


def crowd(rounds: int) -> None:
    """Measure the join of the last rank of two hosts, without a crowd on both and with one."""
    found: dict[int, list[float]] = {0: [], CROWD: []}
    for _ in range(rounds):
        for number, seconds in found.items():
            with tempfile.TemporaryDirectory(prefix="bench-") as name:
                folder = Path(name)
                launch = f"{COMMANDS['rankwise launch']} {STATIC.format(hosts=2)} {HERE / 'on_hosts.py'} join {folder}"
                strangers = f"mkfifo {folder}/in-$HOST; {sys.executable} {STRANGERS} {number} {folder}/ready-$HOST "
                strangers += f"< {folder}/in-$HOST & exec 8> {folder}/in-$HOST; "
                strangers += f"until [ -e {folder}/ready-$HOST ]; do sleep 0.1; done; "
                on_hosts(folder, 2, f"{strangers if number else ''} {launch}; exec 8>&-; wait")
                seconds.append(float((folder / "join").read_text()))
    print("\n| connections to each port | join of the last rank |\n| --- | --- |")
    for number, seconds in found.items():
        print(
            f"| {number} | {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}) |", flush=True
        )


def collectives(sizes: Sequence[int]) -> None:
    print("\n| hosts | call | rankwise | gloo | ratio |\n| --- | --- | --- | --- | --- |", flush=True)
    for hosts in sizes:
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            folder = Path(name)
            command = f"{COMMANDS['rankwise launch']} {STATIC.format(hosts=hosts)}"
            on_hosts(folder, hosts, f"{command} {HERE / 'on_hosts.py'} collectives {folder}")
            for line in (folder / "collectives").read_text().splitlines():
                call, own, gloo = line.split("\t")
                ratio = float(own) / float(gloo)
                print(f"| {hosts} | {call} | {float(own) * 1e6:.0f} us | {float(gloo) * 1e6:.0f} us | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="start,cut,crowd,collectives")
    options = parser.parse_args()
    only = options.only.split(",")
    print(f"load {os.getloadavg()[0]:.0f}", flush=True)
    if "start" in only:
        columns = ["first `all_reduce`", "torchrun", "ratio", "end after a failure", "torchrun", "ratio"]
        table("Start, and the end after a failure", columns, (2, 4), started, options.rounds)
    if "cut" in only:
        columns = ["end on the first host", "torchrun", "ratio", "on the one that is cut off", "torchrun", "ratio"]
        for meet, name in ((STATIC, "static"), (C10D, "c10d")):
            table(f"A host is cut off, {name}; timeout {TIMEOUT} s", columns, (2,), partial(cut, meet), options.rounds)
    if "crowd" in only:
        crowd(options.rounds)
    if "collectives" in only:
        collectives((2, 4))
    print(f"\nload {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
