"""The actors of Ray for the ranks of a job, and their order."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rankwise._launch.engines.interface import RankJob, RankOutcome
from rankwise._launch.engines.rank_child import RankChild


class Place(NamedTuple):
    """Where an actor is: Ray's id of the node and its address, the number of its lowest GPU, and its host's name."""

    node: str
    address: str
    gpu: int
    host: str


class PlacedActor(NamedTuple):
    """An actor, its node's index in the job, and its place."""

    actor: Any
    node_rank: int
    place: Place

    @property
    def host(self) -> str:
        """The name of its host, and the address of its node."""
        return f"{self.place.host} ({self.place.address}, Ray's node {self.place.node[:8]})"


class RankActor:
    """Runs one rank, in a child process: calls of `stop` come while `run` waits."""

    def __init__(self) -> None:
        self._child: RankChild | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def place(self) -> Place:
        """Return where this actor is."""
        import ray  # noqa: PLC0415 - this runs inside of it

        gpus = [int(gpu) for gpu in ray.get_gpu_ids() if str(gpu).isdigit()]
        context = ray.get_runtime_context()
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), min(gpus, default=0), socket.gethostname())

    def free_port(self) -> int:
        """Return a port of this host that nobody listens on."""
        with socket.create_server(("", 0)) as server:
            return int(server.getsockname()[1])

    def run(self, job: RankJob, rank: int, variables: Mapping[str, str]) -> RankOutcome:
        """Run the rank, and return its outcome."""
        with self._lock:
            child = self._child = RankChild(job, rank, {**os.environ, **variables})
            if self._is_stopped:
                self._kill(child)
        return child.wait()

    def stop(self) -> None:
        """Kill the rank."""
        with self._lock:
            self._is_stopped = True
            if self._child is not None:
                self._kill(self._child)

    @staticmethod
    def _kill(child: RankChild) -> None:
        if child.is_running:
            child.was_stopped = True
            child.send_signal(signal.SIGKILL)


def start(group: object, job: RankJob, amounts: Mapping[str, float], timeout: float) -> list[PlacedActor]:
    """Start the actors of a job, and return them by rank.

    Args:
        group: The placement group, with a bundle for each node.
        job: The job.
        amounts: The resources of each actor.
        timeout: How long they may take to start, in seconds.
    """
    import ray  # noqa: PLC0415 - an extra
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    others = {name: amount for name, amount in amounts.items() if name not in {"CPU", "GPU"}}
    # A rank that is killed, and `stop`, are calls beside `run`.
    kind = ray.remote(
        num_cpus=amounts["CPU"], num_gpus=amounts["GPU"], resources=others, max_concurrency=3, max_restarts=0
    )(RankActor)
    actors = [
        kind.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
        ).remote()
        for index in range(job.nnodes)
        for _ in range(job.nproc)
    ]
    places = ray.get([actor.place.remote() for actor in actors], timeout=timeout)
    nodes = sorted({(place.address, place.node) for place in places})
    placed = [
        PlacedActor(actor, nodes.index((place.address, place.node)), place)
        for actor, place in zip(actors, places, strict=True)
    ]
    return sorted(placed, key=lambda one: (one.node_rank, one.place.gpu))


def variables_by_rank(placed: Sequence[PlacedActor], timeout: float) -> list[dict[str, str]]:
    """Return the variables of each rank, as Ray Train sets them: rank zero's node is where they meet."""
    import ray  # noqa: PLC0415 - an extra

    first = placed[0]
    port = ray.get(first.actor.free_port.remote(), timeout=timeout)
    nodes = [one.node_rank for one in placed]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placed)),
            "LOCAL_RANK": str(nodes[:rank].count(one.node_rank)),
            "LOCAL_WORLD_SIZE": str(nodes.count(one.node_rank)),
            "NODE_RANK": str(one.node_rank),
            "MASTER_ADDR": first.place.address,
            "MASTER_PORT": str(port),
        }
        for rank, one in enumerate(placed)
    ]
