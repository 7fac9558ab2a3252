"""`rankwise launch`: the options of torchrun, with the same meaning, and a few more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from rankwise._launch.forkserver.interpreter_exit import exit_without_teardown
from rankwise._launch.grace_period import GRACE_SECONDS
from rankwise.cli.launch_defaults import CommandWithDefaults, is_given, sources_text
from rankwise.cli.torchrun_options import output_settings, torchrun_options
from rankwise.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rankwise.launching import Nodes, ScriptLaunch

_DEFAULT_PORT: Final = 29500
# Any text; shells complete it as a path.
_ANYTHING: Final = click.Path(readable=False)

Command = TypeVar("Command", bound=Callable[..., Any])


def _number_of_ranks(_: click.Context, __: click.Parameter, value: str) -> int:
    from rankwise.launching import check_nproc, parse_nproc  # noqa: PLC0415 - `rankwise env` does not wait for this

    try:
        return check_nproc(parse_nproc(value))
    except InvalidArgumentError as error:
        if value == "p":
            raise click.UsageError("-np is an option of mpirun: rankwise launch has -n, as in -n 2") from None
        raise click.BadParameter(str(error)) from None


def _number_of_nodes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, int]:
    least, _colon, most = value.partition(":")
    try:
        numbers = int(least), int(most or least)
    except ValueError:
        numbers = 0, 0
    if not 0 < numbers[0] <= numbers[1]:
        raise click.BadParameter(f"{value!r} is neither a number of hosts nor MIN:MAX")
    return numbers


def _ranks(_: click.Context, __: click.Parameter, value: str | None) -> frozenset[int] | None:
    """Read "0,3-7"."""
    if value is None:
        return None
    ranks: set[int] = set()
    for part in value.split(","):
        first, _dash, last = part.partition("-")
        try:
            ranks.update(range(int(first), int(last or first) + 1))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of ranks, such as 0,3-7") from None
    if not ranks:
        raise click.BadParameter(f"{value!r} is an empty range of ranks")
    return frozenset(ranks)


def _options(_: click.Context, __: click.Parameter, value: str) -> dict[str, str]:
    """Read "key=value,key=value"."""
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if not all(key.strip() and equals for key, equals, _text in pairs):
        raise click.BadParameter(f"{value!r} is not KEY=VALUE,KEY=VALUE")
    return {key.strip(): text.strip() for key, _equals, text in pairs}


def _flag(name: str, **settings: Any) -> Callable[[Command], Command]:  # noqa: ANN401 - click's
    """Return an option that is written with dashes or, as in older scripts, with underscores."""
    return click.option(f"--{name}", f"--{name.replace('-', '_')}", name.replace("-", "_"), **settings)


@click.command(
    cls=CommandWithDefaults,
    short_help="Run a script on several ranks.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-n", "--nproc", "--nproc-per-node", "--nproc_per_node", "nproc", default="1", show_default=True,
    callback=_number_of_ranks, metavar="N|auto|cpu|gpu",
    help="Number of ranks on this host; cpu: one per core, gpu: one per GPU, auto: gpu if there is one, else cpu.",
)  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as with python -m.")
@_flag("no-python", is_flag=True, help="TARGET is an executable, not a Python script.")
@click.option(
    "--preload",
    metavar="MODULE,...|auto",
    help="Modules to import once, before ranks are forked; auto: the installed ones that the script imports.",
)
@_flag(
    "no-preload",
    is_flag=True,
    help="Start each rank as a new Python interpreter instead of forking a process that has imported torch.",
)
@_flag(
    "max-restarts",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    show_default=True,
    help="Restart all ranks up to this many times after a failure.",
)
@click.option(
    "--grace", type=click.FloatRange(0, 86_400), default=GRACE_SECONDS, show_default=True, metavar="SECONDS",
    help="Time for a rank to exit after Ctrl-C, or after its own error, before it is killed.",
)  # fmt: skip
@click.option(
    "--show",
    callback=_ranks,
    metavar="0,3-7",
    help="Show the output of these ranks only; errors of all ranks are shown.",
)
@_flag("no-prefix", is_flag=True, help="Do not prefix lines of output with [rank].")
@_flag(
    "hang-dir",
    default="",
    metavar="DIR",
    help="Folder for reports of hangs, and for the stacks of ranks that are killed; made if it does not exist.",
)
@click.option(
    "--debug",
    type=click.IntRange(0),
    metavar="RANK",
    help="Stop this rank in pdb at the script's first line, and where an exception has ended it.",
)
@click.option(
    "--debugpy",
    type=click.IntRange(0),
    metavar="RANK",
    help="Let this rank wait for an editor to connect with debugpy, and print how.",
)
@click.option("--standalone", is_flag=True, help="Run on this host only (default unless other options name hosts).")
@click.option(
    "--nnodes",
    default="1",
    callback=_number_of_nodes,
    metavar="N|MIN:MAX",
    help="Number of hosts, or a range for an elastic run.",
)
@_flag(
    "node-rank",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Index of this host, from 0, with the static backend.",
)
@_flag("master-addr", default="", metavar="HOST", help="Address of host 0, with the static backend.")
@_flag(
    "master-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=_DEFAULT_PORT,
    show_default=True,
    help="A free port on host 0, with the static backend.",
)
@_flag(
    "rdzv-backend",
    metavar="static|c10d",
    default="static",
    show_default=True,
    help="How the hosts find each other: static (by --node-rank) or c10d.",
)
@_flag(
    "rdzv-endpoint", default="", metavar="HOST:PORT", help="Address where the hosts find each other; required for c10d."
)
@_flag("rdzv-id", default="none", metavar="ID", show_default=True, help="Id of the run, the same on all hosts.")
@_flag("rdzv-conf", default="", callback=_options, metavar="KEY=VALUE,...", help="Options of the rendezvous backend.")
@click.option(
    "--ssh",
    metavar="HOST,...",
    help="Start the launchers of these hosts from here, over ssh; those beyond --nnodes are spares.",
)
@_flag(
    "ssh-command", envvar="RANKWISE_SSH", default="ssh", show_default=True, metavar="COMMAND",
    help="What --ssh runs in place of ssh, such as 'ssh -F cluster.config'.",
)  # fmt: skip
@click.option(
    "--srun",
    is_flag=True,
    help="In salloc or sbatch: start the launchers of all nodes of the job from here, with srun.",
)
@torchrun_options
@click.argument("target", type=_ANYTHING)
@click.argument("args", nargs=-1, type=_ANYTHING)
@click.pass_context
def launch(ctx: click.Context, /, target: str, args: tuple[str, ...], **flags: Any) -> None:  # noqa: ANN401 - the values that click has parsed
    """Run the Python script TARGET on several ranks, and pass ARGS to it.

    Options that torchrun has too have the same meaning. All ranks run on this host unless the options name other hosts.

    TARGET may be - for standard input. Options have defaults in torchrun's variables PET_*.

    When a rank fails, the others are stopped, and the exit status is that of the failed rank (128 + N for signal N).
    """
    if flags["shutdown_timeout"] is not None and not is_given(ctx, "grace"):
        flags["grace"] = flags["shutdown_timeout"]
    if flags["module"] and flags["no_python"] and not flags["run_path"]:
        raise InvalidArgumentError(
            "--module and --no-python exclude each other: TARGET is either a module or an executable"
        )
    if note := _note_on_arguments(ctx, target, args):
        click.echo(note, err=True)
    hosts = None
    try:
        if flags["ssh"] is not None or flags["srun"]:
            from rankwise.cli.launch_hosts import hosts_of_options  # noqa: PLC0415 - few launches need it

            hosts = hosts_of_options(ctx, flags)
        started = _script_launch(target, args, flags, None if hosts is None else hosts[1])
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}{sources_text(ctx)}") from None
    if hosts is not None:
        from rankwise._launch.hosts.launching_hosts import run_on_hosts_as_command  # noqa: PLC0415 - likewise

        status = run_on_hosts_as_command(started, hosts[0], "rankwise")
    else:
        status = started.run_as_command("rankwise")
    exit_without_teardown(status)


def _note_on_arguments(ctx: click.Context, target: str, args: Sequence[str]) -> str:
    """Return a note on an argument of the script that is an option of this command too, and was not given; or ""."""
    if is_given(ctx, "nproc"):  # the line was written with the order in mind
        return ""
    names = {name for option in ctx.command.params if not is_given(ctx, option.name or "") for name in option.opts}
    found = [word for word in args if word.partition("=")[0] in names - {"-h", "--help", "-m"}]
    if not found:
        return ""
    return (
        f"rankwise: {found[0]} after {target} is an argument of the script; as an option of rankwise, write it before"
    )


def _script_launch(target: str, args: Sequence[str], flags: Mapping[str, Any], hosts: Nodes | None) -> ScriptLaunch:
    """Return the launch that a command line describes.

    Raises:
        InvalidArgumentError: The options are inconsistent.
    """
    from rankwise.launching import Output, ScriptLaunch  # noqa: PLC0415 - `rankwise env` does not wait for this

    return ScriptLaunch(
        target,
        args,
        nproc=flags["nproc"],
        kind=_kind(flags),
        nodes=_nodes(flags) if hosts is None else hosts,
        output=Output(show=flags["show"], **output_settings(flags)),
        max_restarts=flags["max_restarts"],
        grace=flags["grace"],
        preload=_preload(flags),
        debug=flags["debug"],
        debugpy=flags["debugpy"],
        hang_dir=flags["hang_dir"],
        role=flags["role"],
        virtual_local_rank=flags["virtual_local_rank"],
        **({} if flags["signals_to_handle"] is None else {"signals": flags["signals_to_handle"]}),
    )


def _kind(flags: Mapping[str, Any]) -> Literal["script", "module", "program"]:
    if flags["run_path"]:
        return "script"
    return "module" if flags["module"] else "program" if flags["no_python"] else "script"


def _preload(flags: Mapping[str, Any]) -> str | bool:
    """Return the modules to preload; True for the default.

    Raises:
        InvalidArgumentError: The options exclude each other.
    """
    names = {
        "--no-preload": flags["no_preload"],
        "--start-method=spawn": flags["start_method"] == "spawn",
        "--no-python": flags["no_python"],
    }
    others = [name for name, is_set in names.items() if is_set]
    if flags["preload"] is None:
        return not set(others) - {"--no-python"}
    if others:
        other = others[0]
        raise InvalidArgumentError(f"--preload and {other} exclude each other: such ranks are not forked with modules")
    text: str = flags["preload"]
    return text


def _nodes(flags: Mapping[str, Any]) -> Nodes | None:
    """Return the hosts that the options name; None for this host alone."""
    from rankwise.launching import Nodes  # noqa: PLC0415 - `rankwise env` does not wait for this

    least, most = flags["nnodes"]
    address = flags["rdzv_endpoint"]
    if flags["standalone"] or (most == 1 and not address and flags["rdzv_backend"] == "static"):
        return None
    if flags["rdzv_backend"] == "static" and not address:
        if not flags["master_addr"]:
            raise InvalidArgumentError(
                f"--nnodes={most} needs --master-addr (the address of host 0) or --rdzv-endpoint"
            )
        address = f"{flags['master_addr']}:{flags['master_port']}"
    return Nodes(
        num_nodes=most,
        address=address,
        node_rank=flags["node_rank"],
        min_nodes=least,
        backend=flags["rdzv_backend"],
        run_id=flags["rdzv_id"],
        options=flags["rdzv_conf"],
        local_address=flags["local_addr"] or "",
    )
