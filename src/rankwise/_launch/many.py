"""Many launches of a function, with an engine or on this host, where several may run at a time.

Each launch of this host is a run with a thread, which has the event loop of its ranks. The main thread waits for their
ends, and interrupts them if it is interrupted itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from rankwise._arguments import as_integer
from rankwise._launch.function_arguments import with_keywords
from rankwise._launch.functions import returned_values
from rankwise._launch.interrupts import Interrupts
from rankwise._launch.one_host import function_target, run_on_this_host
from rankwise._launch.options import Options, check_nproc, num_accelerators
from rankwise._launch.output.console import SECONDS_TO_READ, SECONDS_TO_READ_AFTER_STOP
from rankwise._launch.output.screen import Screen
from rankwise._launch.output.settings import Output
from rankwise._launch.preload import caller_source
from rankwise._launch.spec import own_environ, threads_of_each
from rankwise._user_frames import ends_at_caller
from rankwise.errors import InvalidArgumentError, LaunchError, message_of, shown

if TYPE_CHECKING:
    from rankwise._launch.engines.interface import Engine

R = TypeVar("R")

# What a failed run does to the others, and to the call.
Failures = Literal["raise", "stop", "return"]

log = logging.getLogger(__name__)

# How often the bar is drawn again, for its clock.
_BAR_SECONDS: Final = 1.0
_BAR_WIDTH: Final = 20


@ends_at_caller
def launch_many(
    fn: Callable[..., R],
    arguments: Iterable[Sequence[Any]] | Mapping[str, Sequence[Any]],
    *,
    nproc: int,
    nnodes: int | None = None,
    on: str | Engine | None = None,
    parallel: int = 1,
    failures: Failures = "raise",
) -> list[list[R]]:
    """Run a function in as many worlds as there are arguments, and return the results of each.

    Local to the caller, as `rankwise.launch`. On this host `parallel` worlds run at a time; a prefix names the world of
    each line of output, and a terminal shows how many have ended. Worlds that run at a time share the cores of this
    host, and take different CUDA devices as long as there are enough. An engine gets all worlds at once, and Slurm as
    an array of jobs, of which it runs as many at a time as it has room for.

    Args:
        fn: The function that each rank runs.
        arguments: The arguments of the function in each world, as tuples; in a dict, by the name of the world.
        nproc: The number of ranks of each world on this host, or on each node.
        nnodes: The number of nodes of each world, for an engine; one by default.
        on: What runs the ranks elsewhere, as for `rankwise.launch`; None for this host.
        parallel: How many worlds run at a time on this host.
        failures: What happens after a world has failed. "raise": the others go on, and the error of the first of those
            that failed is raised in the end. "stop": the others are stopped, and it is raised at once. "return": the
            others go on, and the error takes the place of the world's results.

    Returns:
        For each world, in their order, the results of its ranks, by rank.

    Raises:
        InvalidArgumentError: An argument cannot be used, or cannot be pickled.
        TypeError: The function cannot be called with these arguments.
        RankFailedError: A rank failed; the message names the world.
        MissingDependencyError: A package is missing, as for `rankwise.launch`.
        LaunchError: The ranks could not be started.

    Example:
        >>> launch_many(divmod, [(7, 2), (9, 4)], nproc=2, parallel=2)
        [[(3, 1), (3, 1)], [(2, 1), (2, 1)]]
    """
    if failures not in get_args(Failures):
        raise InvalidArgumentError(
            f"failures={shown(failures)} is not one of {', '.join(map(repr, get_args(Failures)))}"
        )
    if as_integer(parallel, "parallel") < 1:
        raise InvalidArgumentError(f"parallel={parallel} is not a number of launches from 1 on")
    named = (
        dict(arguments) if isinstance(arguments, Mapping) else {f"run {i}": each for i, each in enumerate(arguments)}
    )
    for args in named.values():
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise InvalidArgumentError(f"the arguments of a launch are a tuple, got {shown(args)}: write (x,) for one")
    if on is not None:
        from rankwise._launch.engines.running import outcomes_on  # noqa: PLC0415 - not needed on this host

        if parallel != 1:
            raise InvalidArgumentError("parallel= and on= exclude each other: an engine has a limit of its own")
        ended = outcomes_on(fn, named.values(), on=on, nproc=nproc, nnodes=nnodes, refused=())
    elif nnodes is not None:
        raise InvalidArgumentError(f"nnodes={shown(nnodes)} needs on=, the engine that finds the nodes")
    else:
        ended = Runs(fn, named, nproc=check_nproc(nproc), parallel=parallel).outcomes(hides_errors=failures == "stop")
    outcomes: dict[int, Any] = {}
    with closing(ended):
        for index, outcome in ended:
            outcomes[index] = outcome
            if isinstance(outcome, LaunchError):
                outcome.args = (f"{list(named)[index]}: {outcome}",)
                if failures == "stop":
                    raise outcome
    in_order = [outcomes[index] for index in range(len(named))]
    if failures == "raise":
        for outcome in in_order:
            if isinstance(outcome, LaunchError):
                raise outcome
    return in_order


class Runs:
    """Launches of a function in ranks of this host, some of them at a time."""

    def __init__(
        self, fn: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], *, nproc: int, parallel: int
    ) -> None:
        """Prepare them.

        Args:
            fn: The function.
            arguments: Its arguments in each run, by the name of the run.
            nproc: The number of ranks of each.
            parallel: How many run at a time.

        Raises:
            InvalidArgumentError: The function or an argument cannot be pickled.
            TypeError: The function cannot be called with these arguments.
        """
        self._targets = [
            function_target(with_keywords(fn, args, {}, more=None, own=(), given=()), args)
            for args in arguments.values()
        ]
        self._names = list(arguments)
        self._nproc = nproc
        self._main = caller_source()
        self._parallel = min(parallel, max(1, len(self._targets)))
        self._places: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        self._interrupts: dict[int, Interrupts] = {}
        self._screen = Screen()
        self._begun = time.monotonic()
        self._is_stopping = False

    def outcomes(self, *, hides_errors: bool) -> Generator[tuple[int, Any], None, None]:
        """Run all, and yield the number of each that has ended, with the results of its ranks or the LaunchError.

        The runs that have not ended when the generator is closed, or interrupted, are stopped.

        Args:
            hides_errors: The first error ends the call, which reports it; otherwise errors are shown as they come.
        """
        for place in range(self._parallel):
            self._places.put(_variables(place, self._parallel, self._nproc))
        ended = failed = 0
        with ThreadPoolExecutor(self._parallel, thread_name_prefix="rankwise-launch") as threads:
            running = {threads.submit(self._run, index): index for index in range(len(self._targets))}
            try:
                while running:
                    self._show_bar(ended, failed)
                    for future in wait(running, _BAR_SECONDS, FIRST_COMPLETED).done:
                        index, error = running.pop(future), future.exception()
                        if error is not None and not isinstance(error, LaunchError):
                            raise error
                        ended, failed = ended + 1, failed + (error is not None)
                        if error is not None and not hides_errors:
                            text = message_of(error).partition("\n")[0]
                            self._screen.print_message(f"rankwise: {self._names[index]}: {text}")
                        yield index, future.result() if error is None else error.with_traceback(None)
                self._show_bar(ended, failed, last=True)
            finally:
                self._screen.clear_status()
                self._stop(running)
        for text in self._screen.drain(SECONDS_TO_READ_AFTER_STOP if running else SECONDS_TO_READ):
            log.warning(text)

    def _run(self, index: int) -> list[Any]:
        """Run one launch, in a thread, and return the results of its ranks."""
        environ = self._places.get()
        try:
            with Interrupts() as interrupts:
                self._interrupts[index] = interrupts
                if self._is_stopping:
                    raise KeyboardInterrupt
                console = Output().console(self._nproc, screen=self._screen, run=self._names[index])
                options = Options(nproc=self._nproc, environ=environ)
                return returned_values(
                    run_on_this_host(self._targets[index], options, self._main, console, interrupts=interrupts)
                )
        finally:
            self._interrupts.pop(index, None)
            self._places.put(environ)

    def _stop(self, running: Collection[Future[Any]]) -> None:
        """Interrupt the launches that have not ended, and wait for them; a second Ctrl-C kills their ranks."""
        self._is_stopping = True
        for future in running:
            future.cancel()
        while True:
            for interrupts in list(self._interrupts.values()):
                interrupts.interrupt()
            try:
                wait(running)
            except KeyboardInterrupt:
                continue
            return

    def _show_bar(self, ended: int, failed: int, *, last: bool = False) -> None:
        total = len(self._targets)
        bar = "#" * (_BAR_WIDTH * ended // max(1, total))
        failures = f", {failed} with an error" if failed else ""
        seconds = f"{time.monotonic() - self._begun:.0f} s"
        text = f"rankwise: |{bar:<{_BAR_WIDTH}}| {ended} of {total} launches have ended{failures}, {seconds}"
        self._screen.show_status(text, rank=-1, last=last)


def _variables(place: int, places: int, nproc: int) -> dict[str, str]:
    """Return the variables of a run beside others: its part of the cores, and devices of its own if they suffice."""
    if places == 1:
        return {}
    environ, variables = own_environ(), {}
    if "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = threads_of_each(nproc * places)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    devices = list(map(str, range(num_accelerators()))) if visible is None else visible.split(",")
    if len(devices) > nproc:
        own = [devices[(place * nproc + rank) % len(devices)] for rank in range(nproc)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return variables
