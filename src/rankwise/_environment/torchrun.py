"""torchrun, launchers built on its agent (torchx), and `rankwise launch`, which is one of them."""

from __future__ import annotations

from rankwise._environment.facts import Environ, LaunchEnvironment, read_int, read_port, read_text, require_int
from rankwise._environment.nesting import RUN, is_rankwise_launch
from rankwise.errors import LauncherEnvironmentError


class Torchrun:
    """torchrun (torch.distributed.elastic).

    Reads, all set by its agent: TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and
    GROUP_WORLD_SIZE (the index and the number of agents, one for each node), MASTER_ADDR, MASTER_PORT,
    TORCHELASTIC_USE_AGENT_STORE ("True" if the agent hosts the store), TORCHELASTIC_RESTART_COUNT.
    """

    name: str = "torchrun"
    description: str = "torchrun, torchx"
    variables: tuple[str, ...] = (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
        "TORCHELASTIC_RESTART_COUNT",
    )
    verified: bool = True

    def present(self, environ: Environ) -> bool:
        return "TORCHELASTIC_RUN_ID" in environ

    def read(self, environ: Environ) -> LaunchEnvironment:
        because = "TORCHELASTIC_RUN_ID is: a process started by torchrun has both; unset those of another run"
        attempt = read_int(environ, "TORCHELASTIC_RESTART_COUNT")
        return LaunchEnvironment(
            launcher=self.name,
            rank=require_int(environ, "RANK", because=because),
            world_size=require_int(environ, "WORLD_SIZE", because=because),
            local_rank=require_int(environ, "LOCAL_RANK", because=because),
            local_world_size=read_int(environ, "LOCAL_WORLD_SIZE"),
            node_rank=read_int(environ, "GROUP_RANK"),
            num_nodes=read_int(environ, "GROUP_WORLD_SIZE"),
            host=read_text(environ, "MASTER_ADDR"),
            port=read_port(environ, "MASTER_PORT"),
            job=read_text(environ, "TORCHELASTIC_RUN_ID"),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=attempt.value if attempt else 0,
        )


class RankwiseLaunch(Torchrun):
    """`rankwise launch`, `rankwise.launch`, and the ranks of tests.

    Reads the variables of torchrun, and RANKWISE_RUN_ID, which repeats TORCHELASTIC_RUN_ID, MASTER_ADDR and
    MASTER_PORT: under a torchrun that one of these ranks has started, they differ.
    """

    name: str = "rankwise"
    description: str = "rankwise launch, rankwise.launch, rank tests"
    variables: tuple[str, ...] = (*Torchrun.variables, RUN)

    def present(self, environ: Environ) -> bool:
        return super().present(environ) and is_rankwise_launch(environ)

    def read(self, environ: Environ) -> LaunchEnvironment:
        if not self.present(environ):
            raise LauncherEnvironmentError(
                f"launcher='rankwise' reads TORCHELASTIC_RUN_ID and {RUN}, and {RUN} is "
                f"{environ.get(RUN, 'not set')}; start with rankwise launch"
            )
        return super().read(environ)
