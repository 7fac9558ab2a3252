"""`rankwise doctor`: whether the hosts and ranks of a world are fit for a job."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rankwise._dependencies import has_posix, missing_posix
from rankwise.cli.env_command import read_variables
from rankwise.cli.printing import echo
from rankwise.errors import InvalidArgumentError, JoinError, RankFailedError, RankwiseError, printable

if TYPE_CHECKING:
    from rankwise._doctor.checks import Finding
    from rankwise._doctor.facts import Facts, Link
    from rankwise._environment.facts import LaunchEnvironment

_TIMEOUT: Final = 30.0
_LONGEST: Final = 3600.0
_FOUND_A_FAULT: Final = 1
# How long other ranks leave it to rank zero to say what is wrong: launchers end all ranks when the first has failed.
_RANK_ZERO_SECONDS: Final = 2.0


@click.command(
    short_help="Check whether the hosts and ranks of a job are fit for it.",
    epilog="Example: srun -n 4 rankwise doctor --failing-hosts failing-hosts.txt",
)
@click.option("-n", "--nproc", type=click.IntRange(1), metavar="NUMBER", help="Start so many ranks here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--failing-hosts", type=click.Path(dir_okay=False), default="", metavar="FILE",
    help="Write the names of the hosts where something FAILs into this file, as --exclude of Slurm reads it.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(0, _LONGEST, min_open=True), default=_TIMEOUT, show_default=True,
    metavar="SECONDS", help="How long ranks wait for each other, in each step.",
)  # fmt: skip
@click.option("--launcher", default="auto", show_default=True, metavar="NAME", help="As of rankwise env.")
def doctor(*, nproc: int | None, as_json: bool, failing_hosts: str, timeout: float, launcher: str) -> None:
    """Check whether the hosts and ranks of a job are fit for it, and say what to do.

    Run it in place of a script: srun rankwise doctor. Rank zero prints a line for each check: OK, WARN or FAIL, on
    which ranks, and the remedy. It needs no accelerator.

    The exit status is 1 if something FAILs.
    """
    if not has_posix():
        raise missing_posix("rankwise doctor")
    check = functools.partial(check_as_rank, as_json=as_json, failing_hosts=failing_hosts, timeout=timeout)
    if nproc is None:
        check(launcher=launcher)
        return
    from rankwise.launching import FunctionLaunch, Output  # noqa: PLC0415 - not needed under a launcher

    try:
        FunctionLaunch(functools.partial(check, launcher="auto"), nproc=nproc, output=Output(prefix=False)).run()
    except RankFailedError as error:
        if error.exitcode != _FOUND_A_FAULT or error.traceback:
            raise
        sys.exit(_FOUND_A_FAULT)


@dataclass(kw_only=True)
class _World:
    """What a rank knows of its world.

    Attributes:
        ranks: The facts of all ranks on rank zero, if they have met; else those of this rank.
        links: The connections between the hosts.
        problem: Why the ranks could not meet, or join; "" if they have.
        is_told: Rank zero has sent this problem, and says so itself.
    """

    ranks: list[Facts]
    links: list[Link]
    problem: str = ""
    is_told: bool = False


def check_as_rank(*, as_json: bool, failing_hosts: str, timeout: float, launcher: str) -> None:
    """Check the world as one rank: rank zero prints the findings, others only why they could not meet.

    Raises:
        SystemExit: Something FAILs.
        RankwiseError: The output or the file cannot be written.
    """
    from rankwise._doctor.checks import Finding, examine  # noqa: PLC0415 - not needed for --help

    world = _World(ranks=[], links=[])
    rank, world_size = 0, 1
    try:
        reading = read_variables(launcher)
        rank, world_size = reading.rank.value, reading.world_size.value
        _meet(world, reading, launcher=launcher, timeout=timeout)
    except InvalidArgumentError:
        raise
    except RankwiseError as error:
        world.problem = _one_line(error)
    if rank and not world.problem:
        return
    found = examine(world.ranks, world.links) if world.ranks else []
    if world.problem:  # what was not compared is not known to be well
        found = [one for one in found if one.level == "FAIL" or (one.level == "WARN" and not rank)]
        if not world.is_told:
            found.append(Finding(level="FAIL", check="join" if world.ranks else "variables", text=world.problem))
        time.sleep(_RANK_ZERO_SECONDS if rank else 0)
    elif world_size > 1:
        found.append(Finding(level="OK", check="join", text=f"all {world_size} ranks meet, and exchange values"))
    if failing_hosts and not rank:
        _write_hosts(Path(failing_hosts), found)
    if as_json:
        echo(json.dumps({"world_size": world_size, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        hosts = {one.rank: one.host for one in world.ranks}
        echo("".join(f"{printable(one.line(world_size, hosts))}\n" for one in found), nl=False)
    if world.problem or any(one.level == "FAIL" for one in found):
        sys.exit(_FOUND_A_FAULT)


def _meet(world: _World, reading: LaunchEnvironment, *, launcher: str, timeout: float) -> None:
    """Let the ranks meet, first without a process group and then with one: so that the facts are known if that fails.

    Raises:
        RankwiseError: The ranks could not meet, or join.
    """
    from rankwise._doctor.facts import Facts, collect  # noqa: PLC0415 - as above
    from rankwise._net.json_lines import decode_line, encode_line  # noqa: PLC0415
    from rankwise._rendezvous.membership import JoinReply  # noqa: PLC0415
    from rankwise._session.environ import process_variables  # noqa: PLC0415
    from rankwise.cli.env_ranks import gather_reports, meeting_point  # noqa: PLC0415
    from rankwise.cli.env_report import report_on  # noqa: PLC0415

    endpoint = meeting_point(reading, timeout=timeout)
    own = collect(
        rank=reading.rank.value,
        warnings=(*report_on(reading, process_variables(), launcher).warnings, *_stale(reading, process_variables())),
        rank_zero="" if endpoint is None else endpoint.host,
        environ=process_variables(),
    )
    world.ranks = [own]
    if endpoint is None or reading.world_size.value == 1:
        return

    def report(reply: JoinReply) -> str:
        world.is_told = bool(reply.error) and reading.rank.value > 0
        return encode_line(_with_device(own, reply.complete(reading)))

    lines = gather_reports(endpoint, reading, report, command="doctor", timeout=timeout)
    try:
        world.ranks = [own] if lines is None else [decode_line(Facts, line) for line in lines]
    except ValueError as error:
        raise JoinError(f"the facts of a rank are malformed: {error}; do all run the same rankwise?") from error
    from rankwise._doctor.probes import join_and_probe  # noqa: PLC0415 - it imports torch

    world.links = join_and_probe(own.address, launcher=launcher, timeout=timeout)


def _stale(reading: LaunchEnvironment, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what speaks against RANK and WORLD_SIZE of a world of one: another launcher has started several ranks."""
    from rankwise._environment.detect import launchers  # noqa: PLC0415 - as above

    for other in launchers() if reading.launcher == "plain" and reading.world_size.value == 1 else ():
        with contextlib.suppress(RankwiseError):  # its variables are incomplete
            outer = other.read(environ) if other.present(environ) else reading
            if outer.world_size.value > 1:
                text = f"but {outer.world_size.source}={outer.world_size.value}: each process would be alone"
                yield f"{reading.rank.source}=0 and {reading.world_size.source}=1 are set, {text}"


def _with_device(own: Facts, reading: LaunchEnvironment) -> Facts:
    """Add the device that a rank would have."""
    if not own.version("torch"):
        return own
    from rankwise._session.device import choose_device, uuid_of_device  # noqa: PLC0415 - it imports torch

    try:
        device = choose_device(0 if reading.local_rank is None else reading.local_rank.value, None)
        return replace(own, device=str(device), device_id=uuid_of_device(device, None))
    except JoinError as error:
        return replace(own, device_problem=_one_line(error))


def _write_hosts(file: Path, found: Sequence[Finding]) -> None:
    names = dict.fromkeys(host for one in found if one.level == "FAIL" for host in one.hosts)
    try:
        file.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    except OSError as error:
        raise RankwiseError(f"--failing-hosts {file}: {error.strerror}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
