"""Ranks that run a Python function, and their return values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from rankwise._launch.function_arguments import with_keywords
from rankwise._launch.launched_rank import LaunchedRank
from rankwise._launch.one_host import function_target, run_on_this_host
from rankwise._launch.options import Options, num_accelerators
from rankwise._launch.output.settings import Output
from rankwise._launch.preload import Preload, caller_source
from rankwise._pickling import loads
from rankwise._rendezvous.nodes import Nodes
from rankwise._user_frames import ends_at_caller
from rankwise.errors import InvalidArgumentError, LaunchError, shown

if TYPE_CHECKING:
    from rankwise._launch.engines.interface import Engine

R = TypeVar("R")


@ends_at_caller
def launch(
    fn: Callable[..., R],
    *args: Any,  # noqa: ANN401 - the function's own arguments
    nproc: int | str | None = None,
    nodes: Nodes | None = None,
    output: Output | None = None,
    backend: str | None = None,
    preload: Preload = True,
    max_restarts: int = 0,
    timeout: float | None = None,
    environ: Mapping[str, str] | None = None,
    hang_dir: str = "",
    nnodes: int | None = None,
    on: str | Engine | None = None,
    hosts: Sequence[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,  # noqa: ANN401 - as above
) -> list[R]:
    """Run a function in `nproc` new processes on this host, as the ranks of one world, and return their results.

    Local to the caller: its own session, environment and signal handlers do not change. In the ranks,
    `rankwise.init()` joins the world. Each rank imports the caller's script, as a process that `multiprocessing`
    spawns does: call this function below `if __name__ == "__main__":`. Lambdas and closures are pickled by value, and
    so are the definitions of a notebook and of a script without such a guard. The output of ranks is shown at once.

    Args:
        fn: The function that each rank runs.
        *args: The arguments of the function, the same in each rank.
        nproc: The number of ranks on this host. "auto" starts one on each accelerator, and one on a host without; it is
            the default on this host. With backend="xla" it is the number of XLA devices, which is found where it is not
            given.
        nodes: The hosts of the world, if there are several: a `rankwise.launching.Nodes`. Each host makes this call.
        output: How the output of ranks is shown, a `rankwise.launching.Output`: by default that of all, with a prefix.
        backend: "xla" starts a rank on each XLA device of this host, for which torch_xla has to be installed. Ranks are
            threads where several devices belong to one process, and share its output and its global variables. On the
            hosts of a pod each host makes this call, without `nodes`.
        preload: Modules that are imported once, for all ranks, by the process that they are forked from: names in a
            sequence or in one string, such as "sklearn,pandas"; "auto" for the installed modules that the caller's
            script imports at its top level. True for those of RANKWISE_PRELOAD; torch always is one of them. False
            starts each rank as a new interpreter.
        max_restarts: How often all ranks start again after a failure.
        timeout: After how many seconds the launch is stopped, its restarts included; None for no limit.
        environ: Variables for the ranks, in addition to those of this process.
        hang_dir: A folder for files with the stacks of ranks that were killed, or hang.
        nnodes: The number of nodes that the engine of `on` takes, each with `nproc` ranks; one by default.
        hosts: Names of hosts, as ssh knows them, on each of which `nproc` ranks run, in this order; "localhost" for
            this one. This process starts them over ssh, which has to log in without a password; RANKWISE_SSH may name
            another command, such as "ssh -F config". The interpreter, the working directory and the modules of the
            function have the same paths there.
        on: What runs the ranks elsewhere, as an object or by its name: "slurm" or a `rankwise.launching.SlurmEngine`,
            "ray" or a `rankwise.launching.RayEngine`, or an engine of another package (`rankwise.extend.engines`). None
            for this host. Ranks have no terminal there, and `nodes`, `output`, `backend`, `preload`, `max_restarts`,
            `timeout`, `environ` and `hang_dir` have no meaning.
        kwargs: Keyword arguments of the function, of any name.
        **keywords: Other keyword arguments of the function, with names that are none of the above.

    Returns:
        The results of the ranks of this host, by rank; with `on` or `hosts`, those of all ranks. Tensors are on the
        CPU: this process may have no accelerator, and should not open that of each rank.

    Raises:
        InvalidArgumentError: `nproc` is not a number of processes that this host could run, or not the number of its
            XLA devices; `fn` is no function; the function or an argument cannot be pickled; or there is no such module
            to preload.
        TypeError: The function cannot be called with these arguments.
        RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
        LaunchTimeoutError: The ranks did not end within `timeout` seconds, and were stopped.
        MissingDependencyError: This interpreter has no torch, no torch_xla for backend="xla", or not the package that
            the engine needs.
        LaunchError: The ranks could not be started; a host cannot be used, or is lost; or this process is a rank that
            imports the script, where no guard protects this call.

    Example:
        >>> import rankwise
        >>> rankwise.launch(lambda x: x * rankwise.get_rank(), 10, nproc=2)
        [0, 10]
    """
    options: dict[str, Any] = {
        "max_restarts": max_restarts,
        "timeout": timeout,
        "environ": environ,
        "hang_dir": hang_dir,
    }
    of_hosts = {**options, "nodes": nodes, "output": output, "backend": backend, "preload": preload, "hosts": hosts}
    own = {**of_hosts, "nproc": nproc, "nnodes": nnodes, "on": on, "kwargs": kwargs}
    given = [name for name, value in own.items() if value is not None and value is not _DEFAULTS.get(name)]
    fn = with_keywords(fn, args, keywords, more=kwargs, own=own, given=given)
    number = cast("int | None", nproc)  # what it is not, is refused where it is used
    if on is not None:
        from rankwise._launch.engines.running import outcomes_on  # noqa: PLC0415 - not needed on this host

        refused = [name for name in given if name in of_hosts]
        ((_, outcome),) = outcomes_on(fn, [args], on=on, nproc=number, nnodes=nnodes, refused=refused)
        if isinstance(outcome, LaunchError):
            raise outcome
        return outcome
    if nnodes is not None:
        raise InvalidArgumentError(
            f"nnodes={shown(nnodes)} needs on=, the engine that finds the nodes; hosts that each make this call are "
            "nodes="
        )
    if hosts is not None:
        for name, value in {"nodes": nodes, "backend": backend}.items():
            if value is not None:
                raise InvalidArgumentError(f"{name}= and hosts= exclude each other: each starts ranks in its own way")
        from rankwise._launch.hosts.launching_hosts import launch_on_hosts  # noqa: PLC0415 - not needed on this host

        return launch_on_hosts(fn, args, hosts=hosts, nproc=number, output=output, preload=preload, **options)
    if backend is None and (nproc is None or (isinstance(nproc, str) and nproc == "auto")):
        number = num_accelerators() or 1
    return FunctionLaunch(
        fn, args, nproc=number, nodes=nodes, output=output, backend=backend, preload=preload, **options
    ).run()


# The values of options with which the function of another name was not meant.
_DEFAULTS: Final = {"max_restarts": 0, "hang_dir": "", "preload": True}


class FunctionLaunch(Generic[R]):
    """A launch of a function, as by `rankwise.launch`, in two steps: the function is pickled when this is made.

    So `run` may be called later, or in another thread, when the arguments have changed.

    Args:
        fn: The function that each rank runs.
        args: The arguments of the function, the same in each rank.
        nproc: The number of ranks on this host; None with backend="xla" alone.
        nodes: The hosts of the world; None for this one alone.
        output: How the output of ranks is shown.
        setup: A function that each rank calls first, before it imports the caller's script: one of a module that can be
            imported, without arguments.
        backend: "xla" for a rank on each XLA device, as by `rankwise.launch`.
        preload: Modules that are imported once, for all ranks, as by `rankwise.launch`.
        max_restarts, timeout, environ, hang_dir: As for `rankwise.launch`.

    Raises:
        InvalidArgumentError: An argument cannot be used, or cannot be pickled.
        MissingDependencyError: This interpreter has no torch_xla for backend="xla".
        LaunchError: This process is a rank that imports the script, where no guard protects this call.

    Example:
        >>> FunctionLaunch(divmod, (7, 2), nproc=2).run()
        [(3, 1), (3, 1)]
    """

    def __init__(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] = (),
        *,
        nproc: int | None = None,
        nodes: Nodes | None = None,
        output: Output | None = None,
        setup: Callable[[], object] | None = None,
        backend: str | None = None,
        preload: Preload = True,
        max_restarts: int = 0,
        timeout: float | None = None,
        environ: Mapping[str, str] | None = None,
        hang_dir: str = "",
    ) -> None:
        target: tuple[Callable[..., Any], tuple[Any, ...]] = (fn, tuple(args))
        self._on_devices = backend is not None
        if backend is not None:
            # Other launches do not wait for these.
            from rankwise._launch.xla_devices import check_device_launch, run_on_devices  # noqa: PLC0415
            from rankwise._torch_xla import num_local_processes  # noqa: PLC0415

            target = (run_on_devices, (*target, check_device_launch(backend, nproc, nodes)))
            nproc = num_local_processes()
        options = Options(
            nproc=nproc,  # type: ignore[arg-type]  # None is refused
            nodes=nodes,
            output=Output() if output is None else output,
            preload=preload,
            max_restarts=max_restarts,
            timeout=timeout,
            environ={} if environ is None else environ,
            hang_dir=hang_dir,
        )
        self._target = function_target(*target, setup="" if setup is None else _importable_name(setup))
        self._options = options
        self._main = caller_source()

    @ends_at_caller
    def run(self) -> list[R]:
        """Run the function in the ranks of this host, and return their results, by rank.

        Local, as `rankwise.launch`.

        Raises:
            InvalidArgumentError: There is no such module to preload.
            RankFailedError: A rank failed, and the others were stopped; the original exception is its cause.
            LaunchTimeoutError: The ranks did not end in time, and were stopped.
            MissingDependencyError: This interpreter has no torch.
            LaunchError: The ranks could not be started, or the hosts did not meet.
        """
        if not self._on_devices:
            return self._values()
        from rankwise._launch.xla_devices import reported_by_rank, values_by_rank  # noqa: PLC0415 - as above

        with reported_by_rank():
            return values_by_rank(self._values())

    def _values(self) -> list[Any]:
        """Run the ranks, and return what each process of a rank returns."""
        console = self._options.output.console(self._options.nproc)
        return returned_values(run_on_this_host(self._target, self._options, self._main, console))


def returned_values(ranks: Mapping[int, LaunchedRank]) -> list[Any]:
    """Return what the ranks of a function have returned, by rank."""
    return [loads(ranks[rank].result.value, on_cpu=True) for rank in sorted(ranks)]  # type: ignore[union-attr]  # all have returned


def _importable_name(setup: Callable[[], object]) -> str:
    """Return "module:function".

    Raises:
        InvalidArgumentError: The function is not one that ranks can import.
    """
    module, name = getattr(setup, "__module__", None), getattr(setup, "__qualname__", "<")
    if not callable(setup) or not isinstance(module, str) or module == "__main__" or "<" in name:
        raise InvalidArgumentError(
            f"setup={shown(setup)} is not a function of a module that ranks can import before the caller's script"
        )
    return f"{module}:{name}"
