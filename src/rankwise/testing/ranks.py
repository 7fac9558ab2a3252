"""Running one test body as the ranks of a world, in new processes forked from a server that has torch loaded."""

from __future__ import annotations

import faulthandler
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Final

import cloudpickle
import torch

from rankwise.collectives.groups import barrier
from rankwise.rendezvous import LOOPBACK
from rankwise.session.current import session_in_force
from rankwise.session.joining import init
from rankwise.session.store import serve

# How long a world may take, and how long the others get to fail by themselves after the first failure.
WORLD_SECONDS: Final = 15.0
_GRACE_SECONDS: Final = 1.0


def run_in_ranks(body: Callable[..., object], arguments: Mapping[str, object], *, size: int, name: str) -> str:
    """Run a test body in every rank of a new world.

    Returns:
        "" if it passed on all ranks, else what to tell of those where it did not.
    """
    context = fork_server()
    store, port = serve(one_host=True, timeout=WORLD_SECONDS)
    environ = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTEST_CURRENT_TEST": name,
    }
    call = _pickled(body, arguments)
    ranks: dict[Connection, tuple[int, BaseProcess]] = {}
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process: BaseProcess = context.Process(
            target=_run_rank, args=(sender, rank, environ, sys.path, call), daemon=True
        )
        process.start()
        sender.close()
        ranks[receiver] = (rank, process)
    try:
        return _collect(ranks, size)
    finally:
        for receiver, (_, process) in ranks.items():
            process.kill()
            process.join()
            process.close()
            receiver.close()
        del store


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from a server that has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "cloudpickle", __name__])
    return context


def _pickled(body: Callable[..., object], arguments: Mapping[str, object]) -> bytes:
    """Pickle the body with its module's contents: pytest has rewritten the asserts in them."""
    module = inspect.getmodule(body)
    if module is None:
        raise TypeError(f"{body!r} is of no module")
    cloudpickle.register_pickle_by_value(module)
    try:
        call: bytes = cloudpickle.dumps((body, dict(arguments)))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return call


def _collect(ranks: Mapping[Connection, tuple[int, BaseProcess]], size: int) -> str:
    """Wait for the outcome of every rank; after the first failure, not for long."""
    waiting = dict(ranks)
    failures: dict[int, str] = {}
    deadline = time.monotonic() + WORLD_SECONDS
    while waiting and time.monotonic() < deadline:
        for receiver in connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            if not isinstance(receiver, Connection):
                continue
            rank, process = waiting.pop(receiver)
            try:
                text = receiver.recv()
            except EOFError:
                process.join(timeout=_GRACE_SECONDS)
                text = f"ended with exit code {process.exitcode} before the test did"
            if text:
                failures[rank] = text
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for rank, _ in waiting.values():
        failures.setdefault(rank, "did not finish")
    if not failures:
        return ""
    told: dict[str, list[int]] = {}
    for rank in sorted(failures):
        told.setdefault(failures[rank], []).append(rank)
    parts = [f"ranks {', '.join(map(str, who))}: {text}" for text, who in told.items()]
    return "\n".join([f"{size - len(failures)} of {size} ranks passed", *parts])


def _run_rank(sender: Connection, rank: int, environ: Mapping[str, str], search_path: list[str], call: bytes) -> None:
    """Be one rank: join, run the body between two barriers, and tell how it went."""
    faulthandler.dump_traceback_later(WORLD_SECONDS, exit=True)
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.path[:] = search_path
    torch.set_num_threads(1)
    try:
        body, arguments = pickle.loads(call)
        with init(timeout=WORLD_SECONDS):
            comm = session_in_force().comm
            if "comm" in arguments:
                arguments["comm"] = comm
            barrier()
            body(**arguments)
            barrier()
        sender.send("")
    except BaseException as error:  # noqa: BLE001 - it goes to the parent, whatever it is
        sender.send("".join(traceback.format_exception(error)))
    finally:
        sender.close()
