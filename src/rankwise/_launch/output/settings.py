"""Where the output of ranks goes: to the streams of the launcher, to log files, or to both."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rankwise._arguments import as_bool, as_integer, as_text
from rankwise._launch.output.console import Console
from rankwise._launch.output.line_prefix import prefix_parts
from rankwise._launch.output.log_files import LogFolder, Streams, check_streams, named_ranks
from rankwise._launch.output.screen import Screen
from rankwise.errors import InvalidArgumentError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a launcher shows the output of ranks, on its own standard output and standard error.

    Streams are 1 for standard output, 2 for standard error, 3 for both and 0 for none, for all ranks, or a mapping of
    local ranks to these.

    Attributes:
        prefix: Whether each line begins with the rank that printed it, if there are several ranks; or what stands
            before the rank: "host", "time" or both, in the order of "host,time".
        show: The ranks whose output is shown; None for all. Errors of all ranks are reported.
        local_ranks: The local ranks of this host whose output is shown; None for all.
        log_dir: The folder for log files, one for each rank and attempt, in
            `RUN_ID_RANDOM/attempt_N/LOCAL_RANK/stdout.log` and `stderr.log`. None for a temporary folder, if there are
            files. The files have what ranks wrote, without prefixes, and end with the traceback of a rank that failed.
            `rankwise logs` shows them.
        log_times: Each line of these files begins with its time; not of those that ranks write themselves.
        redirects: The streams that ranks write to their files, and that are not shown.
        tee: The streams that are written to files, and shown too. With `log_dir` alone, all are.

    Raises:
        InvalidArgumentError: A value is not as above.

    Example:
        >>> Output(show={0}, log_dir="logs", redirects=3).show
        {0}
    """

    prefix: bool | str = True
    show: Collection[int] | None = None
    local_ranks: Collection[int] | None = None
    log_dir: str | None = None
    log_times: bool = False
    redirects: Streams | None = None
    tee: Streams | None = None

    def __post_init__(self) -> None:
        prefix_parts(self.prefix)
        for name in ("show", "local_ranks"):
            ranks = getattr(self, name)
            if ranks is not None and (isinstance(ranks, str) or not isinstance(ranks, Collection)):
                raise InvalidArgumentError(f"{name}={shown(ranks)} is not a collection of ranks, such as {{0, 1}}")
            for rank in ranks or ():
                as_integer(rank, f"a rank of {name}")
        if self.log_dir is not None and not as_text(self.log_dir, "log_dir"):
            raise InvalidArgumentError("log_dir='' is not the name of a folder; '.' is the working directory")
        as_bool(self.log_times, "log_times")
        if self.log_times and (self.redirects or (self.log_dir is None and not self.tee)):
            raise InvalidArgumentError(
                "log_times needs files that the launcher writes: those of log_dir or tee, without redirects"
            )
        for name in ("redirects", "tee"):
            if getattr(self, name) is not None:
                check_streams(getattr(self, name), name)

    def check_ranks(self, nproc: int, *, is_world: bool) -> None:
        """Check that the ranks that are named exist.

        Args:
            nproc: The number of ranks on this host.
            is_world: They are all ranks.

        Raises:
            InvalidArgumentError: There is no such rank.
        """
        named = {"local_ranks": self.local_ranks or (), "show": (self.show if is_world else None) or ()}
        for name in ("redirects", "tee"):
            named[name] = named_ranks(getattr(self, name))
        for name, ranks in named.items():
            if unknown := sorted(rank for rank in ranks if not 0 <= rank < nproc):
                raise InvalidArgumentError(
                    f"{name} names rank {unknown[0]}, and of {nproc} ranks, which are counted from 0, the last is "
                    f"{nproc - 1}"
                )

    def console(self, nproc: int, *, in_files: bool = True, screen: Screen | None = None, run: str = "") -> Console:
        """Return the console of a launcher.

        Args:
            nproc: The number of ranks that it shows.
            in_files: It writes the log files too.
            screen, run: Where output is shown, and a name, for one of several launches of this process.
        """
        return Console(
            nproc=nproc,
            shown=self.show,
            local_ranks=self.local_ranks,
            prefixed=self.prefix,
            logs=self.log_folder() if in_files else None,
            screen=screen,
            run=run,
        )

    def log_folder(self) -> LogFolder:
        """Return the log files of a launch."""
        return LogFolder(self.log_dir, redirects=self.redirects, tee=self.tee, has_times=self.log_times)
