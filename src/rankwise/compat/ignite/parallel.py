"""Ignite's `Parallel`: one context for what is launched by a launcher, and for what launches itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rankwise.compat.ignite.identity import get_local_rank, get_world_size
from rankwise.compat.ignite.joining import Method, check_backend, join
from rankwise.compat.ignite.place import forget_hint
from rankwise.compat.ignite.spawning import nodes_of, spawn
from rankwise.errors import InvalidArgumentError
from rankwise.launch.plan import check_nproc
from rankwise.session.session import Session

log = logging.getLogger(__name__)


class Parallel:
    """A context in which `run` runs a function in every rank.

    With `nproc_per_node` the ranks are new processes of this host; without, this process is one, and joins the others
    on entry; without a backend it is alone. If the block raises, the others hear of it.

    Args:
        backend: As for `initialize`.
        nproc_per_node: How many ranks to start on this host.
        nnodes: How many hosts start ranks.
        node_rank: Which of them this one is.
        master_addr, master_port: Where they meet.
        init_method: As for `initialize`.
        spawn_kwargs: What else `spawn` takes; without `nproc_per_node` only `timeout` counts.

    Raises:
        InvalidArgumentError: An argument cannot be used.

    Example:
        >>> with Parallel(backend="gloo") as parallel:
        ...     parallel.run(print, "runs on local rank")
        0 runs on local rank
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        **spawn_kwargs: Any,  # noqa: ANN401 - Ignite's signature
    ) -> None:
        given = {
            "nproc_per_node": nproc_per_node,
            "nnodes": nnodes,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "master_port": master_port,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if backend is not None:
            check_backend(backend)
        elif given:
            raise InvalidArgumentError(
                f"{next(iter(given))} is given, but no backend, and without one there is one process: pass a backend"
            )
        Method.parse(init_method)
        if init_method is not None:
            spawn_kwargs["init_method"] = init_method
        self.backend = backend
        self.init_method = init_method
        self._joining = {"init_method": init_method, "timeout": spawn_kwargs.get("timeout")}
        self._spawning = None if nproc_per_node is None else _checked(given | spawn_kwargs)
        self._session: Session | None = None

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ignite's signature
        """Call `func(local_rank, *args, **kwargs)` in every rank.

        Local to the caller where it starts the ranks; else this process is a rank, and calls it here.

        Raises:
            RankFailedError: A rank that was started here failed, and the others were stopped.
        """
        if self.backend is not None and self._spawning is not None:
            spawn(self.backend, func, args=args, kwargs_dict=kwargs, **self._spawning)
        else:
            log.info("running %r as one of %d", func, get_world_size())
            func(get_local_rank(), *args, **kwargs)

    def __enter__(self) -> Parallel:  # noqa: PYI034 - Self is not in Python 3.10
        if self.backend is not None and self._spawning is None:
            self._session = join(self.backend, self._joining)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            forget_hint()
            session.__exit__(kind, error, traceback)


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Check how many ranks there are to be on which hosts, before anything of the block runs."""
    check_nproc(given["nproc_per_node"])
    nnodes = given.get("nnodes", 1)
    if isinstance(nnodes, int) and nnodes > 1 and "node_rank" not in given:
        raise InvalidArgumentError("nnodes is above 1: pass node_rank, which of the hosts this is")
    nodes_of(given)
    return given
