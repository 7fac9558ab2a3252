"""Ray Train's TorchTrainer."""

from __future__ import annotations

from rankwise._environment.plain import TorchVariables


class RayTrain(TorchVariables):
    """A worker of Ray Train.

    Reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, set by the torch
    backend; and recognizes RAY_JOB_ID beside them, which all actors of Ray have: the others have no rank.
    """

    def __init__(self) -> None:
        super().__init__(
            name="ray", description="TorchTrainer of Ray Train", markers=("LOCAL_RANK", "NODE_RANK", "RAY_JOB_ID")
        )
