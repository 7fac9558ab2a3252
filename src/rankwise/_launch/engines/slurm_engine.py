"""Slurm: a job for each launch, submitted with submitit, and a task of srun for each rank."""

from __future__ import annotations

import importlib.util
import io
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankwise._arguments import as_integer, as_text
from rankwise._dependencies import missing_package
from rankwise._environment.variables import outer_launch_variables
from rankwise._launch.engines import slurm_files, slurm_state
from rankwise._launch.engines.interface import RankJob, RankOutcome
from rankwise._launch.engines.slurm_task import RequeuedTask, SlurmTask
from rankwise._launch.engines.slurm_time import minutes_of
from rankwise._launch.spec import hidden_variables, own_environ
from rankwise.errors import InvalidArgumentError, LaunchError, shown

# So long before the limit a job is requeued whose ranks have not ended after the signal.
_REQUEUE_SECONDS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmEngine:
    """Slurm as the engine of launches: the resources of a job, and where its files are.

    A rank is a task of srun, and finds the others by Slurm's variables. The job has the environment, the interpreter
    and the working directory of the caller, so these have to be on a file system that the nodes share, like `folder`.
    If a rank fails, Slurm stops the others. Needs the package submitit: `pip install submitit`.

    Attributes:
        time: The limit of the job's time, as for sbatch: minutes, "1:00:00" or "1-12"; "" for that of the partition.
        partition: The partition; "" for the default.
        gpus_per_task: The number of GPUs of each rank.
        cpus_per_task: The number of CPUs of each rank; 0 for Slurm's default.
        memory: The memory on each node, as for sbatch: "32G"; "" for Slurm's default.
        signal_seconds: So many seconds before the limit all ranks get SIGUSR2; up to a minute earlier, as Slurm looks
            once a minute. A rank without a handler ignores it.
        requeue: How often the job runs again after its time limit, or after the loss of a node. After the signal, when
            ranks have ended or 10 s are left, it is requeued; `rankwise.restart_count()` counts. Needs `time`.
        folder: The folder for logs, results and the sbatch file. It is made if it does not exist.
        setup: Lines of shell that the job runs before the ranks, such as "module load cuda".
        options: Other options of sbatch, by their long names: {"account": "vision", "exclusive": True}.

    Raises:
        InvalidArgumentError: A value is not as above.

    Example:
        >>> SlurmEngine(time="1:00:00", partition="gpu", gpus_per_task=1).name
        'slurm'
    """

    name: str = field(default="slurm", init=False)
    time: str | int = ""
    partition: str = ""
    gpus_per_task: int = 0
    cpus_per_task: int = 0
    memory: str = ""
    signal_seconds: int = 90
    requeue: int = 0
    folder: str = "rankwise-jobs"
    setup: Sequence[str] = ()
    options: Mapping[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("gpus_per_task", "cpus_per_task", "signal_seconds", "requeue"):
            if as_integer(getattr(self, name), name) < 0:
                raise InvalidArgumentError(f"{name}={getattr(self, name)} is below 0")
        for name in ("partition", "memory", "folder"):
            as_text(getattr(self, name), name)
        minutes = minutes_of(self.time)
        if self.requeue and (minutes is None or self.signal_seconds <= _REQUEUE_SECONDS):
            raise InvalidArgumentError(
                f"requeue={self.requeue} needs the limit `time`, and `signal_seconds` above {_REQUEUE_SECONDS}: a job "
                "is requeued after the signal that it gets before its limit"
            )
        if isinstance(self.setup, str) or not all(isinstance(line, str) for line in self.setup):
            raise InvalidArgumentError(f"setup={shown(self.setup)} is not a sequence of lines")

    def submit(self, jobs: Sequence[RankJob]) -> list[str]:
        """Submit jobs, several as an array, and return their ids.

        Raises:
            InvalidArgumentError: The jobs of an array differ in their numbers of ranks.
            MissingDependencyError: submitit is not installed.
            LaunchError: There is no sbatch, or it has refused the jobs.
        """
        executor = self._executor(jobs)
        slurm_files.make_folder(self._path)
        task = RequeuedTask if self.requeue else SlurmTask
        tasks = [task(job, self._path, self.signal_seconds - _REQUEUE_SECONDS) for job in jobs]
        try:
            with (
                hidden_variables([*outer_launch_variables(own_environ()), "SBATCH_EXPORT"]),
                redirect_stderr(io.StringIO()),  # submitit prints there what its error has too
                executor.batch(),
            ):
                submitted = [executor.submit(each) for each in tasks]
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise LaunchError(f"sbatch has refused the job: {error}") from error
        ids = [str(each.job_id) for each in submitted]
        try:
            for job_id, its_task in zip(ids, tasks, strict=True):
                slurm_files.write_size(self._path, job_id, its_task.job, its_task.token)
        except BaseException:  # nobody could wait for them
            for job_id in ids:
                self.cancel(job_id)
            raise
        return ids

    def wait(self, job_id: str) -> Sequence[RankOutcome]:
        """Wait until a job has ended, and return the outcomes of its ranks.

        Raises:
            LaunchError: The folder has no such job, or Slurm does not answer.
        """
        return slurm_state.wait(self._path, job_id)

    def cancel(self, job_id: str) -> None:
        """Cancel a job. Slurm kills what is left of it after its KillWait.

        Raises:
            LaunchError: scancel has refused.
        """
        slurm_state.run(["scancel", slurm_state.checked(job_id)])

    def logs(self, job_id: str) -> Mapping[int, Sequence[Path]]:
        """Return the files with the output of the ranks that have started, by rank.

        Raises:
            LaunchError: The folder has no files of that job.
        """
        return slurm_files.logs(self._path, slurm_state.checked(job_id))

    def has_ended(self, job_id: str) -> bool:
        """Return whether a job has ended, and will not run again.

        Raises:
            LaunchError: Slurm does not answer.
        """
        return slurm_state.state_of(job_id).has_ended

    def batch_file(self, job: RankJob) -> str:
        """Return the file for sbatch that submits a job.

        Raises:
            MissingDependencyError: submitit is not installed.
        """
        executor = self._executor([job], dry=True)
        # What submitit has for plugins; it writes this text when it submits.
        text: str = executor._make_submission_file_text(executor._submitit_command_str, "")  # noqa: SLF001
        return text

    @property
    def _path(self) -> Path:
        return Path(self.folder).expanduser().absolute()

    def _executor(self, jobs: Sequence[RankJob], *, dry: bool = False) -> Any:  # noqa: ANN401 - an executor of submitit
        """Return submitit's executor for jobs of one size."""
        if importlib.util.find_spec("submitit") is None:
            raise missing_package("Slurm as an engine", "submitit")
        import submitit  # noqa: PLC0415 - an extra

        if len({(job.nproc, job.nnodes) for job in jobs}) > 1:
            raise InvalidArgumentError("the jobs of an array differ in nproc or nnodes: submit them one by one")
        kind = _dry_executor() if dry else submitit.SlurmExecutor
        try:
            executor = kind(folder=self._path, max_num_timeout=self.requeue)
        except RuntimeError:
            raise LaunchError("there is no srun in PATH: submit on a login node of the cluster") from None
        executor.update_parameters(**self._parameters(jobs[0]))
        return executor

    def _parameters(self, job: RankJob) -> dict[str, Any]:
        """Return the parameters of submitit, which has defaults of its own for some."""
        return {
            "job_name": job.name,
            "nodes": job.nnodes,
            "ntasks_per_node": job.nproc,
            "time": minutes_of(self.time),
            "partition": self.partition or None,
            "gpus_per_task": self.gpus_per_task or None,
            "cpus_per_task": self.cpus_per_task or None,
            "mem": self.memory or None,
            "signal_delay_s": self.signal_seconds,
            "setup": list(self.setup) or None,
            "wckey": None,
            "srun_args": ["--kill-on-bad-exit=1", *self._srun_options],
            "additional_parameters": {
                "requeue" if self.requeue else "no-requeue": True,
                "export": "ALL",  # the job has the environment of the caller, whatever SBATCH_EXPORT says
                **self.options,
            },
        }

    @property
    def _srun_options(self) -> list[str]:
        # srun does not inherit it from sbatch since Slurm 22.05.
        return [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []


def _dry_executor() -> Any:  # noqa: ANN401 - a class of submitit
    """Return submitit's executor for a host that need not have Slurm."""
    import submitit  # noqa: PLC0415 - an extra

    class DryExecutor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 1

    return DryExecutor
