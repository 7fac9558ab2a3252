"""What the hosts of a world see of each other: whether each can connect to each, and how far their clocks differ.

One rank of each host listens on a port of the system's choice. Whoever connects gets the time, and nothing else.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rankwise._collectives.all_gather import all_gather
from rankwise._doctor.facts import Link
from rankwise._net.host import own_addresses
from rankwise._session.api import init

_CONNECT_SECONDS: Final = 2.0
_TIME: Final = struct.Struct("!d")
_MOST_ADDRESSES: Final = 4


def join_and_probe(address: str, *, launcher: str, timeout: float) -> list[Link]:
    """Join the world, and return the connections between its hosts.

    Collective over the world. Each wait for another rank ends after `timeout` seconds.

    Raises:
        RankwiseError: The ranks could not join, or one was lost.
    """
    with init(device="cpu", timeout=timeout, launcher=launcher) as session:
        listens = session.topology.local_rank == 0 and session.topology.num_nodes > 1
        with _listening() if listens else contextlib.nullcontext(0) as port:
            # The address that it uses to reach rank zero is the first that others try.
            places = all_gather((session.rank, port, tuple(dict.fromkeys(filter(None, (address, *own_addresses()))))))
            others = [place for place in places if place[1] and place[0] != session.rank] if port else []
            with ThreadPoolExecutor(max(1, len(others))) as threads:
                links = list(threads.map(lambda place: connect(session.rank, *place), others))
            return [link for each in all_gather(links) for link in each]


@contextlib.contextmanager
def _listening() -> Iterator[int]:
    """Tell the time to whoever connects, at the port that this yields."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # until it is closed
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(_TIME.pack(time.time()))

        thread = threading.Thread(target=serve, daemon=True, name="rankwise-doctor")
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def connect(source: int, target: int, port: int, addresses: tuple[str, ...]) -> Link:
    """Connect to the first of several addresses that answers."""
    problems = []
    for address in addresses[:_MOST_ADDRESSES]:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
                start = time.time()
                (there,) = _TIME.unpack(connection.recv(_TIME.size, socket.MSG_WAITALL))
                end = time.time()
            return Link(source=source, target=target, offset=there - (start + end) / 2, round_trip=end - start)
        except (OSError, struct.error) as error:
            problems.append(f"{address}: {error}")
    return Link(source=source, target=target, problem=f"port {port} of {', '.join(problems) or 'no address'}")
