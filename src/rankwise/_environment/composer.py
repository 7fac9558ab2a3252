"""The launcher of MosaicML's Composer."""

from __future__ import annotations

from rankwise._environment.plain import TorchVariables


class Composer(TorchVariables):
    """A process of the `composer` command.

    Reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, set by its launcher
    on each node. It sets no variable of its own: variables that are set by hand as completely are read alike.
    """

    def __init__(self) -> None:
        super().__init__(
            name="composer", description="composer", markers=("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
        )
