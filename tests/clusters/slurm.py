"""A throw-away Slurm of several virtual nodes on this machine: real slurmctld, slurmd and srun, over loopback.

Debian's packages refuse two nodes on one host name, but not two that claim different ones: `NodeHostname` and
`slurmd -N` do the rest. No systemd, no cgroups; all files are in one folder, and only processes started here are
ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.clusters.packages import which
from tests.session.worlds import free_port

PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
CONFIGURATION = """\
ClusterName=rankwise
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=node[0-{last}] NodeHostname=node[0-{last}] NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] \
CoresPerSocket=8 RealMemory=16000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES OverSubscribe=YES DefaultTime=10 MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(folder: Path, *, nodes: int) -> Iterator[dict[str, str]]:
    """Run a cluster in a folder, and give the variables that its clients need."""
    port, variables = free_port(nodes + 1), {"SLURM_CONF": str(folder / "slurm.conf")}
    for name in ("run", "log", "state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            port=port,
            folder=folder,
            last=nodes - 1,
            first_port=port + 1,
            last_port=port + nodes,
        )
    )
    # slurmd loads a cgroup plugin though nothing uses it, and fails where it cannot detect the version.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    try:
        _start(
            "munged",
            "--force",
            f"--socket={folder}/munge.sock",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/run/munged.pid",
            f"--log-file={folder}/log/munged.log",
            f"--seed-file={folder}/run/munged.seed",
        )
        _start("slurmctld", "-f", str(folder / "slurm.conf"), **variables)
        for number in range(nodes):
            _start("slurmd", "-N", f"node{number}", "-f", str(folder / "slurm.conf"), **variables)
        _wait_until_idle(nodes, variables)
        yield variables
    finally:
        _end(folder)


def _start(program: str, *args: str, **variables: str) -> None:
    command = [which(program) or program, *args]
    subprocess.run(command, env=_environ() | variables, check=True, capture_output=True, timeout=200)


def _wait_until_idle(nodes: int, variables: dict[str, str]) -> None:
    deadline = time.monotonic() + 100
    command = ["sinfo", "-h", "-N", "-o", "%T"]
    while time.monotonic() < deadline:
        told = subprocess.run(
            command, env=_environ() | variables, capture_output=True, text=True, check=False, timeout=200
        )
        if told.stdout.split() == ["idle"] * nodes:
            return
        time.sleep(0.1)
    raise TimeoutError(f"the nodes are not idle: {told.stdout} {told.stderr}")


def _end(folder: Path) -> None:
    pids = [int(path.read_text()) for path in (folder / "run").glob("*.pid")]
    daemons = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    for daemon in daemons:
        daemon.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(daemons, timeout=5)
    # A step's own daemon has no file. One that has not yet reported its end to slurmctld would try to for ever.
    for process in [*alive, *_working_in(folder / "log")]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _working_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder):
                found.append(process)
    return found


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
