"""`rankwise submit`, `logs` and `cancel`: scripts whose ranks Slurm runs, and manifests for Kubernetes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rankwise._dependencies import has_posix, missing_posix
from rankwise.cli.printing import echo
from rankwise.errors import InvalidArgumentError, LaunchError

if TYPE_CHECKING:
    from rankwise._launch.engines.interface import RankJob
    from rankwise.launching import SlurmEngine

_FOLDER: Final = "rankwise-jobs"
_ANYTHING: Final = click.Path(readable=False)

_folder = click.option(
    "--folder",
    default=_FOLDER,
    show_default=True,
    help="Folder of the jobs' logs and results, on a shared file system.",
)


def _pairs(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str | bool]:
    """Read "account=vision" and "exclusive"."""
    found: dict[str, str | bool] = {}
    for value in values:
        name, equals, text = value.lstrip("-").partition("=")
        found[name] = text if equals else True
    return found


@click.command(
    short_help="Submit a script to Slurm, or write a manifest.",
    context_settings={"ignore_unknown_options": True},
    epilog="Example: rankwise submit -n 8 --nnodes 2 train.py --lr 0.1",
)
@click.option(
    "-n",
    "--nproc-per-node",
    "--nproc",
    "nproc",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of ranks on each node.",
)
@click.option("--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Number of nodes.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, as with python -m.")
@click.option("--no-python", is_flag=True, help="TARGET is an executable, not a Python script.")
@click.option("--dry-run", is_flag=True, help="Print the file for sbatch, or the manifest, and submit nothing.")
@click.option("--time", default="", metavar="LIMIT", help="Time limit: minutes, 1:00:00 or 1-12 (days-hours).")
@click.option("--partition", default="", help="Slurm's partition.")
@click.option("--gpus-per-task", type=click.IntRange(0), default=0, help="Number of GPUs of each rank.")
@click.option("--cpus-per-task", type=click.IntRange(0), default=0, help="Number of CPUs of each rank.")
@click.option("--mem", "memory", default="", help="Memory on each node, such as 32G; with --k8s such as 32Gi.")
@click.option(
    "--signal-seconds",
    type=click.IntRange(0),
    default=90,
    show_default=True,
    help="Send SIGUSR2 to the ranks so long before the time limit.",
)
@click.option(
    "--requeue",
    type=click.IntRange(0),
    default=0,
    metavar="TIMES",
    help="Run again so often after the time limit, or after the loss of a node.",
)
@click.option(
    "--setup", multiple=True, metavar="LINE", help="A line of shell to run before the ranks; may be repeated."
)
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    callback=_pairs,
    metavar="NAME[=VALUE]",
    help="Another option of sbatch, such as account=vision; may be repeated.",
)
@_folder
@click.option("--k8s", is_flag=True, help="Write a manifest for Kubernetes, with --dry-run.")
@click.option(
    "--kind",
    type=click.Choice(["job", "jobset"]),
    default="job",
    show_default=True,
    help="With --k8s: an Indexed Job, or a JobSet.",
)
@click.option("--image", default="", help="With --k8s: the container image, which has rankwise and TARGET.")
@click.option("--name", default="", help="Name of the job; by default that of TARGET.")
@click.argument("target", type=_ANYTHING)
@click.argument("args", nargs=-1, type=_ANYTHING)
def submit(target: str, args: tuple[str, ...], **flags: Any) -> None:  # noqa: ANN401 - the values that click has parsed
    """Submit the Python script TARGET with its ARGS to Slurm: a task for each rank.

    Prints the id of the job, where its logs are, and the commands to follow and to cancel it. The job has this
    environment, interpreter and working directory. With --k8s --dry-run, prints a manifest for kubectl instead.

    Options may stand before or after TARGET. Others after it are ARGS, and so is everything after "--".
    """
    if target.startswith("-"):  # an unknown one is an argument of the script, but not before the script
        raise click.NoSuchOption(target)
    if flags["k8s"]:
        _print_manifest(target, args, flags)
    else:
        _submit(_rank_job(target, args, flags), _slurm(flags), dry_run=flags["dry_run"])


@click.command(
    short_help="Show the output of the ranks of a launch or job.", epilog="Example: rankwise logs -f runs/logs --rank 0"
)
@click.argument("job", metavar="FOLDER|JOB")
@click.option("--rank", type=click.IntRange(0), help="Show this rank only; in a FOLDER, its local rank.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@_folder
def logs(job: str, rank: int | None, folder: str, *, follow: bool) -> None:
    """Show what the ranks of a launch have written, each line with its rank.

    FOLDER is the --log-dir of `rankwise launch`, for its newest launch, or one of the folders in it. Lines with times,
    as by --log-times, are shown in their order. JOB is the id of a job of Slurm, by `rankwise submit`: with --follow,
    a failure of the job is reported at the end, and is the exit status.
    """
    if not has_posix():
        raise missing_posix("rankwise logs")
    from rankwise.cli.log_reader import launch_folder, show_launch  # noqa: PLC0415 - `rankwise env` does not wait for it

    launch = launch_folder(job)
    if launch is not None:
        show_launch(launch, rank, follow=follow)
        return
    if not job[:1].isdigit():
        raise InvalidArgumentError(
            f"{job!r} is neither the id of a job, nor a folder with log files of a launch, as by --log-dir"
        )
    engine = _engine(folder)
    _show_logs(job, rank, engine, follow=follow)
    if follow:
        _report(job, engine)


@click.command(short_help="Cancel a job of Slurm.", epilog="Example: rankwise cancel 12345")
@click.argument("job_id", metavar="JOB")
def cancel(job_id: str) -> None:
    """Cancel JOB in Slurm, with all of its ranks."""
    engine = _engine(_FOLDER)
    if engine.has_ended(job_id):  # scancel says nothing
        raise LaunchError(f"job {job_id} has ended, or is not one of this cluster")
    engine.cancel(job_id)


def _engine(folder: str) -> SlurmEngine:
    from rankwise.launching import SlurmEngine  # noqa: PLC0415 - `rankwise env` does not wait for this

    return SlurmEngine(folder=folder)


def _slurm(flags: Mapping[str, Any]) -> SlurmEngine:
    from rankwise.launching import SlurmEngine  # noqa: PLC0415 - as above

    names = ("time", "partition", "gpus_per_task", "cpus_per_task", "memory", "signal_seconds", "requeue", "folder")
    return SlurmEngine(**{name: flags[name] for name in names}, setup=flags["setup"], options=flags["options"])


def _rank_job(target: str, args: tuple[str, ...], flags: Mapping[str, Any]) -> RankJob:
    from rankwise._launch.engines.interface import RankJob  # noqa: PLC0415 - as above
    from rankwise._launch.forkserver.ipc import TargetKind  # noqa: PLC0415
    from rankwise._launch.targets import check_target, is_piped  # noqa: PLC0415

    if flags["module"] and flags["no_python"]:
        raise InvalidArgumentError("--module and --no-python exclude each other: TARGET is a module or an executable")
    kind = TargetKind.MODULE if flags["module"] else TargetKind.PROGRAM if flags["no_python"] else TargetKind.SCRIPT
    if kind is TargetKind.SCRIPT and is_piped(target):
        raise InvalidArgumentError(
            f"script {target!r} can be read once only, and each rank reads it: write it to a file"
        )
    check_target(kind, target)
    return RankJob(
        nproc=flags["nproc"],
        nnodes=flags["nnodes"],
        name=flags["name"] or Path(target).stem,
        kind=kind,
        argv=(target, *args),
    )


def _submit(job: RankJob, engine: SlurmEngine, *, dry_run: bool) -> None:
    ranks = f"{job.world_size} ranks of {shlex.join(job.argv)}"
    if dry_run:
        echo(engine.batch_file(job), nl=False)
        click.echo(f"{ranks}: not submitted", err=True)
        return
    (job_id,) = engine.submit([job])
    folder = "" if engine.folder == _FOLDER else f" --folder {shlex.quote(engine.folder)}"
    echo(
        f"job {job_id}: {ranks}\n"
        f"logs: {Path(engine.folder).expanduser().absolute()}/{job_id}_RANK_log.out and .err\n"
        f"follow: rankwise logs -f {job_id}{folder}\n"
        f"cancel: rankwise cancel {job_id}"
    )


def _print_manifest(target: str, args: tuple[str, ...], flags: Mapping[str, Any]) -> None:
    from rankwise._launch.engines.kubernetes_manifest import Manifest  # noqa: PLC0415 - as above

    if not flags["dry_run"]:
        raise InvalidArgumentError("--k8s needs --dry-run: it prints a manifest, for `kubectl apply -f -`")
    if not flags["image"]:
        raise InvalidArgumentError("--k8s needs --image, a container image with rankwise and the script")
    python = [] if flags["no_python"] else ["python", "-m"] if flags["module"] else ["python"]
    manifest = Manifest(
        name=flags["name"] or Path(target).stem,
        image=flags["image"],
        command=(*python, target, *args),
        nnodes=flags["nnodes"],
        nproc=flags["nproc"],
        gpus=flags["gpus_per_task"],
        cpus=flags["cpus_per_task"],
        memory=flags["memory"],
        time=flags["time"],
        restarts=flags["requeue"],
    )
    echo(manifest.text(flags["kind"]), nl=False)


def _show_logs(job_id: str, rank: int | None, engine: SlurmEngine, *, follow: bool) -> None:
    """Print the lines that the files have got, and with `follow` go on until the job has ended."""
    from rankwise.cli.log_reader import FOLLOW_SECONDS, LogReader  # noqa: PLC0415 - as above

    reader = LogReader(rank)
    while True:
        has_ended = not follow or engine.has_ended(job_id)
        files = engine.logs(job_id)
        if has_ended:
            reader.check_rank(files, f"job {job_id}")
        reader.show(files, last=has_ended)
        if has_ended:
            return
        time.sleep(FOLLOW_SECONDS)


def _report(job_id: str, engine: SlurmEngine) -> None:
    """Raise the failure of a job that has ended, if it has failed.

    Raises:
        RankFailedError: A rank has failed.
    """
    from rankwise._launch.engines.running import raise_failed  # noqa: PLC0415 - as above

    raise_failed(engine.wait(job_id), engine, job_id)
