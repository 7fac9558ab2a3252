"""How often the ranks of a job were started again, by its launcher and by its scheduler."""

from __future__ import annotations

from typing import Final

from rankwise._environment.facts import Environ, read_int

# Set by torchrun and by `rankwise launch`, which start ranks again after a failure; by Slurm, which requeues a job.
RESTART_COUNTS: Final = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def count_restarts(environ: Environ) -> int:
    """Return how often the ranks were started again: the sum, since each requeued job counts from 0.

    Raises:
        LauncherEnvironmentError: A variable is not a whole number.
    """
    counts = [read_int(environ, name) for name in RESTART_COUNTS]
    return sum(count.value for count in counts if count is not None)
