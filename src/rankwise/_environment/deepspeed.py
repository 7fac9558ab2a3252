"""The launcher of DeepSpeed."""

from __future__ import annotations

from rankwise._environment.plain import TorchVariables


class DeepSpeed(TorchVariables):
    """A process of the `deepspeed` command.

    Reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK and CROSS_SIZE (the index and the number of nodes),
    MASTER_ADDR and MASTER_PORT, set by its launcher on each node.
    """

    def __init__(self) -> None:
        super().__init__(name="deepspeed", description="deepspeed", markers=("LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE"))
