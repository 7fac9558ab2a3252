"""How long this host takes to look up the name of an address.

Torch's stores look up the name of the address that they connect to, for their log messages. Where no name server
answers, that takes 10 s a connection, with the usual settings of the resolver.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

log = logging.getLogger(__name__)


def warn_if_slow(address: str, seconds: float) -> bool:
    """Log a warning if a lookup of the name of a numeric address has no result after so many seconds; return whether.

    In a thread, since a lookup cannot be interrupted; the thread is abandoned if it is slow.
    """

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):  # no name is a result, too
            # As torch does: an address of IPv4 in the form of IPv6, for which /etc/hosts has no names.
            socket.getnameinfo((address if ":" in address else f"::ffff:{address}", 0, 0, 0), 0)

    thread = threading.Thread(target=look_up, daemon=True, name="rankwise-reverse-lookup")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        log.warning(
            "joining is slow: torch looks up the name of %s (reverse DNS) for each connection to its store, and the "
            "name server of this host does not answer; set RES_OPTIONS='timeout:1 attempts:1' for all ranks, or "
            "correct the name servers in /etc/resolv.conf",
            address,
        )
        return True
    return False
