"""Running a plan on torch's elastic agent, as it comes.

What is decided above this file does not depend on who starts the ranks: `run` takes a plan and returns how they ended.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from rankwise.environment.reading import PLACE
from rankwise.errors import LaunchError, RankFailure
from rankwise.launch.plan import Plan
from rankwise.launch.store import LoopbackRendezvous

# Torch's context takes these over for good.
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What libraries listen on besides the store stays on this host too, unless the user chose an interface.
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TALKATIVE: Final = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)
# What the user said of this process is not true of its ranks.
_UNSET: Final = tuple(option for name in PLACE for option in ("-u", f"RANKWISE_{name.upper()}"))


def run(plan: Plan) -> list[RankFailure]:
    """Start the ranks of a plan, wait for all of them, and return how those that failed did, the first in time first.

    The first failure ends the others.

    Raises:
        LaunchError: The ranks could not be started.
        KeyboardInterrupt: Ctrl-C, after the ranks have ended.
    """
    env = shutil.which("env")
    if env is None:
        raise LaunchError("there is no `env` program on this host, which starts ranks with their own variables")
    with tempfile.TemporaryDirectory(prefix="rankwise-") as logs, _signals_restored(), _quiet():
        rendezvous = LoopbackRendezvous(uuid.uuid4().hex)
        spec = WorkerSpec(
            role="default",
            local_world_size=plan.nproc,
            entrypoint=env,
            args=(*_UNSET, *(f"{name}={value}" for name, value in _variables(plan)), *map(_literal, plan.command)),
            rdzv_handler=rendezvous,
            max_restarts=0,
            monitor_interval=0.05,
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=logs))
        try:
            result = agent.run()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            rendezvous.shutdown()
    failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
    return [RankFailure(rank=rank, host=socket.gethostname(), exitcode=failure.exitcode) for rank, failure in failures]


def _literal(word: str) -> str:
    """Return a word that the agent does not substitute in: it knows ${local_rank}, scripts do not expect it to."""
    return word.replace("$", "$$")


def _variables(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from plan.environ
    loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
    for name in _INTERFACES:
        if loopback is not None and name not in os.environ:
            yield name, loopback
    if "OMP_NUM_THREADS" not in os.environ:
        yield "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // plan.nproc))


@contextmanager
def _signals_restored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # then nobody sets any
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's log to itself: what it says of a failure, the report says better."""

    def silence(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(silence)
    try:
        yield
    finally:
        for name in _TALKATIVE:
            logging.getLogger(name).removeFilter(silence)
