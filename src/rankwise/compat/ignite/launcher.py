"""Ignite's `Parallel`: one context manager for programs under a launcher, and for programs that start their ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from rankwise import Session
from rankwise.compat.ignite._identity import reset_local_rank
from rankwise.compat.ignite._initialize import InitMethod, join
from rankwise.compat.ignite._logging import log_on_rank_zero
from rankwise.compat.ignite._model_backends import advice, available_backends, is_usable
from rankwise.compat.ignite._queries import get_local_rank, get_world_size
from rankwise.compat.ignite._spawn import check_nproc_per_node, nodes_of, spawn
from rankwise.errors import InvalidArgumentError

__all__ = ["Parallel"]

_LOGGER: Final = "launcher.Parallel"


class Parallel:
    """A context manager whose `run` runs a function in every rank.

    With `nproc_per_node` the ranks are new processes on this host. Without it, this process is a rank, and joins the
    others on entry. Without a backend it is a world of one. If the block raises, the error is reported to the other
    ranks.

    Args:
        backend: As for `initialize`.
        nproc_per_node: The number of ranks to start on this host.
        nnodes: The number of hosts that start ranks.
        node_rank: The index of this host among them.
        master_addr, master_port: The address of the rendezvous.
        init_method: As for `initialize`, except an address.
        spawn_kwargs: Other arguments of `spawn`; without `nproc_per_node` only `timeout` is used.

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
        given: dict[str, Any] = {
            "nproc_per_node": nproc_per_node,
            "nnodes": nnodes,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "master_port": master_port,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if backend is not None and not is_usable(backend):
            raise InvalidArgumentError(
                f"Unknown backend {backend!r}. Available backends: {available_backends()}{advice(backend)}"
            )
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
        self._join_arguments = {"init_method": init_method, "timeout": spawn_kwargs.get("timeout")}
        # Checked here, so that an error is raised before any statement of the block runs.
        self._spawn_params = None if nproc_per_node is None else self._setup_spawn_params(**given, **spawn_kwargs)
        self._session: Session | None = None

    @staticmethod
    def _setup_spawn_params(nproc_per_node: int, **params: Any) -> dict[str, Any]:  # noqa: ANN401 - Ignite's signature
        """Return the arguments of `spawn` that are set, checked. Local.

        Raises:
            InvalidArgumentError: An argument cannot be used.
        """
        check_nproc_per_node(nproc_per_node)
        given = {name: value for name, value in params.items() if value is not None}
        nodes_of(given)
        return {"nproc_per_node": nproc_per_node, **given}

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ignite's signature
        """Call `func(local_rank, *args, **kwargs)` in every rank.

        Local where it starts the ranks; otherwise this process is a rank, and calls the function itself.

        Raises:
            RankFailedError: A rank that was started on this host failed, and the others were stopped.
        """
        if self.backend is not None and self._spawn_params is not None:
            log_on_rank_zero(_LOGGER, "Spawn function '%s' in %d processes", func, self._spawn_params["nproc_per_node"])
            spawn(self.backend, func, args=args, kwargs_dict=kwargs, **self._spawn_params)
        else:
            log_on_rank_zero(_LOGGER, "- Run '%s' in %d processes", func, get_world_size())
            func(get_local_rank(), *args, **kwargs)
        log_on_rank_zero(_LOGGER, "End of run")

    def __enter__(self) -> Self:
        if self.backend is None:
            return self
        if self._spawn_params is None:
            self._session = join(self.backend, self._join_arguments)
            log_on_rank_zero(_LOGGER, "Initialized processing group with backend: '%s'", self.backend)
        else:
            log_on_rank_zero(_LOGGER, "Initialized distributed launcher with backend: '%s'", self.backend)
            settings = "\n\t".join(f"{name}: {value}" for name, value in self._spawn_params.items())
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
