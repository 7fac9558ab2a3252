"""Worlds for tests that look at joining itself: programs in new processes, each with an environment of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from rankwise._environment.variables import VARIABLES

PROGRAMS = Path(__file__).parent / "programs"
FIRST_PORT, NUM_PORTS, PORTS_OF_PROCESS = 20000, 12000, 600
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")


def clean_environ(**variables: str) -> dict[str, str]:
    """Return this process's environment without anything of a launcher's, and with these variables."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in VARIABLES and not name.startswith(LAUNCHER_VARIABLES)
    }
    return own | {"OMP_NUM_THREADS": "1"} | variables


def run_in(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, in a folder that has its temporary files too, and return its output."""
    return subprocess.run(
        command,
        env=clean_environ(TMPDIR=str(folder)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@functools.cache
def _ports_of_process() -> tuple[socket.socket, Iterator[int]]:
    """Return every tenth port of a range that no other process of tests has, in turn, and what keeps it reserved.

    Names of abstract sockets are free again when the process has ended.
    """
    for first in range(FIRST_PORT, FIRST_PORT + NUM_PORTS, PORTS_OF_PROCESS):
        reserved = socket.socket(socket.AF_UNIX)
        try:
            reserved.bind(f"\0ports of tests from {first}")
        except OSError:
            reserved.close()
            continue
        return reserved, itertools.cycle(range(first, first + PORTS_OF_PROCESS, 10))
    raise RuntimeError(f"{NUM_PORTS // PORTS_OF_PROCESS} processes of tests have all ports")


def free_port(count: int = 1) -> int:
    """Return the first of some ports in a row that were free a moment ago.

    They are of those that the kernel gives to nobody by itself, and each process of tests on this host has its own.
    """
    numbers = _ports_of_process()[1]
    while True:
        first = next(numbers)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
            return first


def run_ranks(
    program: str, environs: Sequence[dict[str, str]], *args: str, seconds: float = 200.0, fresh: bool = False
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program of the folder `programs` once for each environment, all at the same time.

    In processes forked from a server that has torch loaded, since most of a test would be `import torch`; or in fresh
    interpreters, where it matters how a program ends.
    """
    command = [str(PROGRAMS / program), *args]
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        logs = [(Path(name) / f"{rank}.out", Path(name) / f"{rank}.err") for rank in range(len(environs))]
        start = _start_fresh if fresh else _start_forked
        ends = [start(command, clean_environ(**environ), *log) for environ, log in zip(environs, logs, strict=True)]
        deadline = time.monotonic() + seconds
        codes = [end(max(0.0, deadline - time.monotonic())) for end in ends]
        return [
            subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())
            for code, (out, err) in zip(codes, logs, strict=True)
        ]


def _start_fresh(command: list[str], environ: dict[str, str], out: Path, err: Path) -> Callable[[float], int]:
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen([sys.executable, *command], env=environ, stdout=stdout, stderr=stderr)

    def end(seconds: float) -> int:
        try:
            return process.wait(seconds)
        finally:
            process.kill()
            process.wait()

    return end


def _start_forked(command: list[str], environ: dict[str, str], out: Path, err: Path) -> Callable[[float], int]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "cloudpickle", "rankwise._session.api"])
    process: BaseProcess = context.Process(target=_be, args=(command, environ, str(out), str(err)))
    process.start()

    def end(seconds: float) -> int:
        process.join(seconds)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        if code is None:
            raise TimeoutError(f"{command} did not end: {err.read_text()}")
        return code

    return end


def _be(command: list[str], environ: dict[str, str], out: str, err: str) -> None:
    """Be `python COMMAND` in a forked process."""
    for number, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()


@contextlib.contextmanager
def garbage_thrown(seed: int) -> Iterator[None]:
    """Let a process throw garbage at whatever this one and its descendants listen on, and check that it has."""
    command = [sys.executable, str(PROGRAMS / "garbage.py"), str(seed), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as thrower:
        try:
            yield
        finally:
            thrower.kill()
        told = thrower.communicate()[0].split()
    assert int(told[-1]) > 0


def plain(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """Return the variables that somebody sets by hand."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }
