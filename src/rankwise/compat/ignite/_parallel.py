"""Ignite's `Parallel`: one context for what is launched by a launcher, and for what launches itself."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from rankwise import Session
from rankwise.compat.ignite._identity import reset_local_rank
from rankwise.compat.ignite._initialize import InitMethod, is_available, join
from rankwise.compat.ignite._logging import log_on_rank_zero
from rankwise.compat.ignite._models import available_backends
from rankwise.compat.ignite._queries import get_local_rank, get_world_size
from rankwise.compat.ignite._spawn import check_nproc_per_node, nodes_of, spawn
from rankwise.errors import InvalidArgumentError

_LOGGER: Final = "launcher.Parallel"


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
        init_method: As for `initialize`, but no address.
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
        if backend is not None and not is_available(backend):
            raise InvalidArgumentError(f"Unknown backend {backend!r}. Available backends: {available_backends()}")
        if backend is None and given:
            name, value = next(iter(given.items()))
            raise InvalidArgumentError(
                f"If backend is None, argument {name!r} should be also None, but given {value!r}: without one there is "
                "one process"
            )
        if InitMethod.parse(init_method).address is not None:
            raise InvalidArgumentError(
                f"init_method={init_method!r}: Parallel does not take it, as in Ignite, where it will hang. "
                "To fix this, please configure MASTER_ADDR and MASTER_PORT in the environment, or pass master_addr and "
                "master_port"
            )
        if init_method is not None:
            spawn_kwargs["init_method"] = init_method
        self.backend = backend
        self.init_method = init_method
        self._joining = {"init_method": init_method, "timeout": spawn_kwargs.get("timeout")}
        # What is wrong with it is raised before anything of the block runs.
        self._spawning = None if nproc_per_node is None else given | spawn_kwargs
        if self._spawning is not None:
            check_nproc_per_node(nproc_per_node)
            nodes_of(self._spawning)
        self._session: Session | None = None

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ignite's signature
        """Call `func(local_rank, *args, **kwargs)` in every rank.

        Local to the caller where it starts the ranks; else this process is a rank, and calls it here.

        Raises:
            RankFailedError: A rank that was started here failed, and the others were stopped.
        """
        if self.backend is not None and self._spawning is not None:
            log_on_rank_zero(_LOGGER, "Spawn function '%s' in %d processes", func, self._spawning["nproc_per_node"])
            spawn(self.backend, func, args=args, kwargs_dict=kwargs, **self._spawning)
        else:
            log_on_rank_zero(_LOGGER, "- Run '%s' in %d processes", func, get_world_size())
            func(get_local_rank(), *args, **kwargs)
        log_on_rank_zero(_LOGGER, "End of run")

    def __enter__(self) -> Parallel:  # noqa: PYI034 - Self is not in Python 3.10
        if self.backend is None:
            return self
        if self._spawning is None:
            self._session = join(self.backend, self._joining)
            log_on_rank_zero(_LOGGER, "Initialized processing group with backend: '%s'", self.backend)
        else:
            log_on_rank_zero(_LOGGER, "Initialized distributed launcher with backend: '%s'", self.backend)
            settings = "\n\t".join(f"{name}: {value}" for name, value in self._spawning.items())
            log_on_rank_zero(_LOGGER, "- Parameters to spawn processes: \n\t%s", settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            log_on_rank_zero(_LOGGER, "Finalized processing group with backend: '%s'", self.backend)
            reset_local_rank()
            session.__exit__(kind, error, traceback)
