"""The address where the processes of torch_xla meet: on one host loopback, on a pod of TPUs its first worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rankwise._environment.facts import Environ, Fact, parse_int, read_port
from rankwise._environment.tpu import first_host
from rankwise._net.addresses import LOOPBACK
from rankwise.errors import LauncherEnvironmentError

# Below the ports of outgoing connections, and none of those that TPUs use (8431, 8470 to 8490).
_DEFAULT_PORT: Final = 29421


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """Where the processes meet: at a store that the first of them serves.

    Attributes:
        host, port: Its address.
        is_served_here: This process is the first one.
    """

    host: str
    port: int
    is_served_here: bool


def meeting_place(environ: Environ, *, one_host: bool, process_index: int) -> MeetingPlace:
    """Return where the processes meet.

    Pure. `torch_xla.launch` sets CLOUD_TPU_TASK_ID and TPU_PROCESS_ADDRESSES in each process; a process that it has not
    started may have TPU_WORKER_HOSTNAMES. Both lists have the same order. MASTER_ADDR and MASTER_PORT take precedence.

    Args:
        environ: The variables.
        one_host: All processes are on this host.
        process_index: The index of this process among all, for kinds of devices that set no variable.

    Raises:
        LauncherEnvironmentError: No variable names the first worker, or one cannot be read.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # they are the address of a launcher's own store
        environ = {name: value for name, value in environ.items() if name not in {"MASTER_ADDR", "MASTER_PORT"}}
    own = str(process_index)
    index = parse_int(environ.get("CLOUD_TPU_TASK_ID", own), "CLOUD_TPU_TASK_ID")
    slice_index = parse_int(environ.get("MEGASCALE_SLICE_ID", "0"), "MEGASCALE_SLICE_ID")
    port = read_port(environ, "MASTER_PORT")
    host = Fact(LOOPBACK, "one host") if one_host else first_host(environ)
    if host is None:
        raise LauncherEnvironmentError(
            "the ranks are on several hosts, but no variable names the first one, so they cannot meet: set MASTER_ADDR "
            "to it on all hosts, or TPU_WORKER_HOSTNAMES to all of them"
        )
    return MeetingPlace(
        host=host.value, port=_DEFAULT_PORT if port is None else port.value, is_served_here=index == slice_index == 0
    )
