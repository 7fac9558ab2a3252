"""The options of torchrun beyond those for ranks, hosts and restarts: output, and those with another meaning here."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from rankwise.errors import InvalidArgumentError

Command = TypeVar("Command", bound=Callable[..., Any])

# What to do in place of an option.
_INSTEAD: Final = {
    "event_log_handler": "no events are recorded: attempts and failures are reported on standard error",
    "logs_specs": "log files are in torchrun's own layout: see --log-dir, --redirects and --tee",
    "nprocs": "the number of ranks is -n, as in -n 2",
    "duplicate_stdout_filters": "use --tee 1 and grep the files stdout.log below --log-dir",
    "duplicate_stderr_filters": "use --tee 2 and grep the files stderr.log below --log-dir",
    "log_line_prefix_template": "what stands before the rank of each line is --prefix, as in --prefix host,time",
    "print_completion": "run _RANKWISE_COMPLETE=bash_source rankwise, or zsh_source, or fish_source",
    "numa_binding": "let the script call os.sched_setaffinity with the cores of its LOCAL_RANK, or start a program "
    "that runs numactl with --no-python",
}
_HARMLESS: Final = frozenset({"", "null"})
# The kernel delivers them to no handler.
_NOT_HANDLED: Final = frozenset({"SIGKILL", "SIGSTOP"})


def torchrun_options(command: Command) -> Command:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def output_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Output` that the options stand for.

    Raises:
        InvalidArgumentError: The options exclude each other.
    """
    if flags["prefix"] and flags["no_prefix"]:
        raise InvalidArgumentError("--prefix and --no-prefix exclude each other")
    return {
        "prefix": flags["prefix"] or not flags["no_prefix"],
        "local_ranks": flags["local_ranks_filter"],
        **{name: flags[name] for name in ("log_dir", "log_times", "redirects", "tee")},
    }


def _streams(_: click.Context, parameter: click.Parameter, value: str | None) -> object:
    from rankwise._launch.output.log_files import parse_streams  # noqa: PLC0415 - `rankwise env` does not wait for this

    if value is None:
        return None
    try:
        return parse_streams(value, parameter.name or "")
    except InvalidArgumentError as error:
        raise click.BadParameter(str(error)) from None


def _local_ranks(_: click.Context, __: click.Parameter, value: str) -> frozenset[int] | None:
    try:
        return frozenset(map(int, value.split(","))) if value else None
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of local ranks, such as 0,1,2") from None


def _signals(_: click.Context, __: click.Parameter, value: str | None) -> tuple[signal.Signals, ...] | None:
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in signal.Signals.__members__ or name in _NOT_HANDLED:
            raise click.BadParameter(f"{name!r} is not a signal that can be handled, such as SIGTERM or SIGUSR1")
    return tuple(signal.Signals[name] for name in names)


def _refused(_: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None and value not in _HARMLESS:
        raise click.BadParameter(f"{value!r} has no meaning here: {_INSTEAD[parameter.name or '']}")


def _option(name: str, *short: str, **settings: Any) -> Callable[[Command], Command]:  # noqa: ANN401 - click's
    names = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
    return click.option(*short, *names, name.replace("-", "_"), **settings)


_OPTIONS: Final[list[Callable[[Any], Any]]] = [
    _option("prefix", metavar="host,time", help="What stands before the rank in the prefix of each line."),
    _option(
        "log-dir",
        metavar="FOLDER",
        help="Write log files, one for each rank and attempt, to a new folder in this one: of both streams, which are "
        "shown too, unless --redirects or --tee say otherwise.",
    ),
    _option("log-times", is_flag=True, help="Begin each line of these files with its time."),
    _option(
        *("redirects", "-r"), callback=_streams, metavar="STREAMS",
        help="Streams to write to log files only: 1 stdout, 2 stderr, 3 both; for some local ranks: 0:3,1:2.",
    ),
    _option(
        *("tee", "-t"), callback=_streams, metavar="STREAMS", help="Streams to write to log files and show, likewise."
    ),
    _option(
        "local-ranks-filter", default="", callback=_local_ranks, metavar="0,1,...",
        help="Show the output of these local ranks only, as --show with ranks of the world.",
    ),
    _option("role", default="default", show_default=True, help="ROLE_NAME of the ranks."),
    _option("run-path", is_flag=True, help="TARGET is a script, also with --no-python."),
    _option(
        "virtual-local-rank", is_flag=True,
        help="LOCAL_RANK is 0 in each rank, and CUDA_VISIBLE_DEVICES names its GPU alone.",
    ),
    _option(
        "signals-to-handle", callback=_signals, metavar="SIG,...", help="Signals on which the ranks are stopped."
    ),
    _option(
        "shutdown-timeout", type=click.FloatRange(0, 86_400), metavar="SECONDS", help="The same as --grace."
    ),
    _option("local-addr", metavar="HOST", help="Address of this host for the other ones, with c10d."),
    _option(
        "start-method", type=click.Choice(["spawn", "fork", "forkserver"]),
        help="spawn is --no-preload; with the others, ranks are forked, which is the default.",
    ),
    _option(
        "monitor-interval", type=float, help="No effect: the end of a rank is noticed at once."
    ),
    *(_option(name.replace("_", "-"), callback=_refused, hidden=True) for name in _INSTEAD),
]  # fmt: skip
