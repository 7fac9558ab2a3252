"""A drop-in for the `tools/launch.py` of detection projects: `python -m rankwise.compat.torch_launch`.

It starts a program, usually a shell script with the training command; this interpreter runs a `.py` file that is not
executable. Ranks find their rank in the environment, and with `--use_env=False` their local rank as `--local_rank` too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from rankwise.errors import InvalidArgumentError, LaunchError
from rankwise.launching import Nodes, Output, ScriptLaunch, parse_nproc

_NAME: Final = "rankwise.compat.torch_launch"
_DEFAULT_PORT: Final = 29500
# Exit statuses.
_FOUND_A_FAULT: Final = 1
_MISUSED: Final = 2
# Options without a value; all others take the next argument.
_FLAGS: Final = frozenset({"--use_env", "--no_prefix", "--help"})


def parse_args() -> argparse.Namespace:
    """Return the parsed command line.

    Local. It ends the process with status 2 if the command line is wrong.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {_NAME}",
        description="Start the ranks of this machine, each a process that runs the same program.",
        epilog="Options may be written with dashes: --nproc-per-node. The first rank that fails ends the others.",
    )
    parser.add_argument("--nnodes", type=int, default=1, help="number of machines; start this command on each of them")
    parser.add_argument("--node_rank", type=int, default=0, help="the index of this machine, from 0")
    parser.add_argument(
        "--nproc_per_node",
        type=_parse_count,
        default=1,
        help="number of ranks on this machine: an integer, auto, gpu or cpu",
    )
    parser.add_argument("--master_addr", default="127.0.0.1", help="the first machine, if there are several")
    parser.add_argument(
        "--master_port",
        type=int,
        default=_DEFAULT_PORT,
        help="a free port of the first machine (29500; on one machine another, if that is taken)",
    )
    parser.add_argument(
        "--use_env",
        type=_parse_bool,
        default=True,
        metavar="True|False",
        help="False: every rank's last argument is --local_rank=N (True: LOCAL_RANK in its environment is all)",
    )
    parser.add_argument("--max_restarts", type=int, default=0, help="how often all ranks are started again (0)")
    parser.add_argument("--no_prefix", action="store_true", help="do not write [rank] in front of lines")
    parser.add_argument("training_script", help="the program, or a Python script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser.parse_args(_normalized(sys.argv[1:]))


def main() -> None:
    """Start the ranks, wait for all of them, and exit with the status of the first that failed.

    Local: this process is not one of the ranks.

    Raises:
        SystemExit: A rank failed, with its status; or the ranks could not be started, or a signal ended them.
    """
    try:
        launch = _launch(parse_args())
    except (InvalidArgumentError, LaunchError) as error:
        sys.stderr.write(f"{_NAME}: {error}\n")
        sys.exit(_MISUSED if isinstance(error, InvalidArgumentError) else _FOUND_A_FAULT)
    status = launch.run_as_command(_NAME)
    if status:
        sys.exit(status)


def _launch(args: argparse.Namespace) -> ScriptLaunch:
    """Return the launch that a command line describes.

    Raises:
        InvalidArgumentError: There is no such program, or the options are inconsistent.
        LaunchError: The working directory was deleted.
    """
    kind = _kind(args.training_script)
    return ScriptLaunch(
        args.training_script,
        args.training_script_args,
        nproc=args.nproc_per_node,
        kind=kind,
        nodes=_nodes(args),
        output=Output(prefix=not args.no_prefix),
        max_restarts=args.max_restarts,
        # Only Python scripts profit from being forked from a process that has loaded torch.
        preload=kind == "script",
        ports=(_DEFAULT_PORT, 0) if args.master_port == _DEFAULT_PORT else (args.master_port,),
        append_local_rank=not args.use_env,
    )


def _kind(target: str) -> Literal["script", "program"]:
    """Return "program" for a target that is executable, or "script" for one that this interpreter runs.

    Raises:
        InvalidArgumentError: The target is neither.
        LaunchError: The working directory was deleted.
    """
    path = Path(target)
    is_python = path.suffix == ".py" and path.is_file()
    program = shutil.which(target)
    if program is not None and not (is_python and not _has_interpreter(program)):
        return "program"
    if is_python:
        return "script"
    if path.is_file():
        raise InvalidArgumentError(
            f"{target!r} cannot be run: chmod +x {target}, and name it with its folder, as ./{path.name}"
        )
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise LaunchError(
            "the working directory was deleted, and ranks that start in it cannot load torch; cd to one that exists"
        ) from error
    raise InvalidArgumentError(f"program {target!r} does not exist (looked in {here} and in PATH)")


def _has_interpreter(program: str) -> bool:
    """Return whether the first line of a file names its interpreter."""
    with Path(program).open("rb") as file:
        return file.read(2) == b"#!"


def _nodes(args: argparse.Namespace) -> Nodes | None:
    """Return the machines; None for this one alone.

    Raises:
        InvalidArgumentError: --node_rank is not below --nnodes.
    """
    if args.nnodes < 1 or not 0 <= args.node_rank < args.nnodes:
        raise InvalidArgumentError(
            f"--node_rank={args.node_rank} is not one of --nnodes={args.nnodes} machines, counted from 0"
        )
    if args.nnodes == 1:
        return None
    address = f"{args.master_addr}:{args.master_port}"
    return Nodes(num_nodes=args.nnodes, node_rank=args.node_rank, address=address, run_id=address)


def _normalized(argv: Sequence[str]) -> list[str]:
    """Return a command line as the parser reads it: dashes in options as underscores, and --use_env with its value."""
    normalized = list(argv)
    index = 0
    while index < len(normalized) and normalized[index].startswith("--") and normalized[index] != "--":
        name, equals, value = normalized[index].partition("=")
        name = "--" + name.removeprefix("--").replace("-", "_")
        normalized[index] = "--use_env=True" if name == "--use_env" and not equals else name + equals + value
        index += 1 if equals or name in _FLAGS else 2  # an option without "=" has its value in the next argument
    return normalized


def _parse_count(text: str) -> int:
    try:
        return parse_nproc(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_bool(text: str) -> bool:
    if text.lower() not in {"true", "false", "1", "0"}:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in {"true", "1"}


if __name__ == "__main__":
    main()
