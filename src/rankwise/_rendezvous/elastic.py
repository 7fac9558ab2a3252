"""The rendezvous of launchers, in torch's interface: on one host, a store on loopback that is kept between restarts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, Final

from torch.distributed import DistStoreError, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from rankwise._net.addresses import LOOPBACK
from rankwise._net.job_secret import JobSecret
from rankwise._rendezvous.c10d_endpoint import at_endpoint
from rankwise._rendezvous.nodes import STATIC, Nodes
from rankwise._rendezvous.signed_store import SignedStore
from rankwise._rendezvous.static_rendezvous import FixedNodesRendezvous, StaticRendezvous
from rankwise._rendezvous.store import serve
from rankwise._rendezvous.waiting import WaitingReport
from rankwise._torch import announced_each_round, hosts_that_met
from rankwise.errors import JoinError, LaunchError

_TIMEOUT: Final = 300.0
_C10D: Final = "c10d"
_SHOW_SECONDS: Final = 1.0
# How long the launcher waits for the number of nodes that wait.
_ANSWER_SECONDS: Final = 0.5


class LoopbackRendezvous(FixedNodesRendezvous):
    """The rendezvous of a single launcher, which is this process.

    No other process can take the port, and only this host can reach it.
    """

    def __init__(self, run_id: str, ports: Sequence[int] = (0,)) -> None:
        self._run_id = run_id
        self._store, self._port = _serve_first(ports)

    def get_backend(self) -> str:
        return "rankwise-loopback"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))


def _serve_first(ports: Sequence[int]) -> tuple[Store, int]:
    """Serve a store on the first of these ports that is free, and return it with the port.

    Raises:
        LaunchError: No port is free, or this process cannot connect to its own store.
    """
    for port in ports:
        try:
            return serve(one_host=True, timeout=_TIMEOUT, port=port)
        except (JoinError, DistStoreError) as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
            problem = error
    raise LaunchError(
        f"port {', '.join(map(str, ports))} of this host cannot be used: {problem.strerror}; name another, or none"
    ) from problem


def multi_node_rendezvous(nodes: Nodes, secret: JobSecret | None, waiting: WaitingReport) -> RendezvousHandler:
    """Return the rendezvous of the launchers of several hosts: rankwise's own for "static", else torch's.

    Args:
        nodes: The hosts.
        secret: The secret of the job; None without one.
        waiting: Tells the user which hosts have come, while others are waited for.
    """
    if nodes.backend == STATIC:
        return StaticRendezvous(nodes, secret, waiting)
    handler = _asked_without_waiting(announced_each_round(_of_torch(nodes, secret, waiting)))
    if nodes.backend == _C10D:
        handler = _shown_while_waiting(handler, waiting)
    return _with_errors_in_words(handler, nodes)


def _with_errors_in_words(handler: RendezvousHandler, nodes: Nodes) -> RendezvousHandler:
    """Make a rendezvous of torch say why the hosts did not meet, and return it: torch's errors are bare names."""
    usual = handler.next_rendezvous
    run = f"run {nodes.run_id!r} (--rdzv-id) at {nodes.address}"

    def next_rendezvous() -> RendezvousInfo:
        try:
            return usual()
        except RendezvousTimeoutError:
            text = f"the {nodes.min_nodes} hosts of {run} did not meet in time; start the same command on each"
        except RendezvousConnectionError:
            handler.shutdown = lambda: True  # type: ignore[method-assign]  # else it asks the store
            text = (
                f"the store of {run} is gone: the launcher that served it has ended; a launch beside another one needs "
                "a run id of its own"
            )
        except RendezvousClosedError:
            text = f"{run} is over; another launch needs another run id"
        except RendezvousStateError as error:
            text = f"the store of {run} has something else than the state of a rendezvous: {error}"
        raise LaunchError(text)

    handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    return handler


def _shown_while_waiting(handler: RendezvousHandler, waiting: WaitingReport) -> RendezvousHandler:
    """Make a c10d rendezvous tell which hosts have come, and return it."""
    usual = handler.next_rendezvous

    def show(over: threading.Event) -> None:
        while not over.wait(_SHOW_SECONDS):
            names, is_spare = hosts_that_met(handler)
            waiting.show_named(names, is_spare=is_spare)

    def next_rendezvous() -> RendezvousInfo:
        over = threading.Event()
        # A thread: torch waits for the hosts in this one.
        thread = threading.Thread(target=show, args=[over], daemon=True, name="rankwise-waiting")
        waiting.begin()
        thread.start()
        try:
            return usual()
        finally:
            over.set()
            thread.join()

    handler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    return handler


def _of_torch(nodes: Nodes, secret: JobSecret | None, waiting: WaitingReport) -> RendezvousHandler:
    options: dict[str, Any] = {**nodes.options}
    parameters = RendezvousParameters(
        backend=nodes.backend,
        endpoint=nodes.address,
        run_id=nodes.run_id,
        min_nodes=nodes.min_nodes,
        max_nodes=nodes.num_nodes,
        local_addr=nodes.local_address or None,
        **options,
    )
    if nodes.backend != _C10D:
        return registry.get_rendezvous_handler(parameters)
    if secret is None:
        return at_endpoint(parameters, registry.get_rendezvous_handler, waiting)
    # Torch unpickles the state that is in the store, so only launchers with the secret may have written it.
    parameters.run_id = f"{nodes.run_id}/unsigned"  # the backend writes an empty state, without a code
    _, store = at_endpoint(parameters, create_backend, waiting)
    parameters.run_id = nodes.run_id
    signed_store = SignedStore(store, secret)
    return create_handler(signed_store, C10dRendezvousBackend(signed_store, nodes.run_id), parameters)


def _asked_without_waiting(handler: RendezvousHandler) -> RendezvousHandler:
    """Let a handler answer at once how many nodes wait: as far as it knows, if its store does not answer.

    The launcher asks all the time. A store on a host that is lost keeps it in compiled code, where it does not notice
    that its ranks have failed.
    """
    ask = handler.num_nodes_waiting
    answers: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
    is_asking = False

    def attempt() -> None:
        try:
            answers.put(ask())
        except Exception as error:  # noqa: BLE001 - raised again in the launcher's thread
            answers.put(error)

    def num_nodes_waiting() -> int:
        nonlocal is_asking
        if not is_asking:
            is_asking = True
            threading.Thread(target=attempt, daemon=True, name="rankwise-nodes-waiting").start()
        try:
            answer = answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            return 0
        is_asking = False
        if isinstance(answer, Exception):
            raise answer
        return answer

    handler.num_nodes_waiting = num_nodes_waiting  # type: ignore[method-assign]
    return handler
