"""One script, any number of ranks.

Public names are loaded when they are first used, so that `import rankwise` does not import torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise import data as data
    from rankwise._collectives.all_gather import all_gather, all_gather_cat
    from rankwise._collectives.all_to_all import all_to_all
    from rankwise._collectives.groups import barrier, new_group, node_group, one_per_node_group
    from rankwise._collectives.point_to_point import recv, send
    from rankwise._collectives.reduce import all_reduce, all_reduce_
    from rankwise._collectives.reduce_scatter import reduce_scatter
    from rankwise._collectives.reduce_to_one import reduce
    from rankwise._collectives.rooted import broadcast, gather
    from rankwise._collectives.scatter import scatter
    from rankwise._comm.group import Group
    from rankwise._comm.group_rank import GroupRank
    from rankwise._comm.work import Work
    from rankwise._environment.detect import detect, launchers
    from rankwise._environment.facts import LaunchEnvironment
    from rankwise._launch.functions import launch
    from rankwise._session.api import finalize, init
    from rankwise._session.current import is_joined
    from rankwise._session.getters import (
        backend,
        device,
        explain,
        get_local_rank,
        get_local_world_size,
        get_node_rank,
        get_num_nodes,
        get_rank,
        get_world_size,
        hostname,
        is_rank_zero,
        restart_count,
        store,
        topology,
    )
    from rankwise._session.key_value_store import Store
    from rankwise._session.progress_report import report_progress
    from rankwise._session.session import Session
    from rankwise._trace.lateness import Lateness
    from rankwise._training.checkpoints import Checkpoints
    from rankwise._training.gradient_clipping import clip_grad_norm_
    from rankwise._training.gradients import sync_grads
    from rankwise._training.metrics import Metrics
    from rankwise._training.module_wrappers import no_sync, wrap_ddp
    from rankwise._training.parameters import sync_buffers, sync_params
    from rankwise._training.random_streams import random_state, random_streams, same_seed, seed, set_random_state
    from rankwise._training.rank_control import in_rank_order, one_rank_only, rank_zero_first, rank_zero_only
    from rankwise._training.rank_zero_output import on_rank_zero, print, progress  # noqa: A004 - as the builtin
    from rankwise._training.stopping import Stop
    from rankwise._training.synced_values import assert_synced
    from rankwise.errors import (
        CollectiveError,
        CollectiveTimeoutError,
        InvalidArgumentError,
        JoinError,
        JoinTimeoutError,
        LauncherEnvironmentError,
        LaunchError,
        LaunchTimeoutError,
        MismatchError,
        MissingDependencyError,
        NotJoinedError,
        PayloadTypeError,
        RankFailedError,
        RankFailure,
        RankwiseError,
        RemoteRankError,
        StoreError,
        StoreTimeoutError,
        TopologyError,
    )
    from rankwise.topology import Topology

    __version__: str

# In full, for type checkers do not compute it; `_HOMES` has the same names.
__all__ = [
    "Checkpoints",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Group",
    "GroupRank",
    "InvalidArgumentError",
    "JoinError",
    "JoinTimeoutError",
    "Lateness",
    "LaunchEnvironment",
    "LaunchError",
    "LaunchTimeoutError",
    "LauncherEnvironmentError",
    "Metrics",
    "MismatchError",
    "MissingDependencyError",
    "NotJoinedError",
    "PayloadTypeError",
    "RankFailedError",
    "RankFailure",
    "RankwiseError",
    "RemoteRankError",
    "Session",
    "Stop",
    "Store",
    "StoreError",
    "StoreTimeoutError",
    "Topology",
    "TopologyError",
    "Work",
    "all_gather",
    "all_gather_cat",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "assert_synced",
    "backend",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "detect",
    "device",
    "explain",
    "finalize",
    "gather",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_num_nodes",
    "get_rank",
    "get_world_size",
    "hostname",
    "in_rank_order",
    "init",
    "is_joined",
    "is_rank_zero",
    "launch",
    "launchers",
    "new_group",
    "no_sync",
    "node_group",
    "on_rank_zero",
    "one_per_node_group",
    "one_rank_only",
    "print",
    "progress",
    "random_state",
    "random_streams",
    "rank_zero_first",
    "rank_zero_only",
    "recv",
    "reduce",
    "reduce_scatter",
    "report_progress",
    "restart_count",
    "same_seed",
    "scatter",
    "seed",
    "send",
    "set_random_state",
    "store",
    "sync_buffers",
    "sync_grads",
    "sync_params",
    "topology",
    "wrap_ddp",
]

_HOMES = {
    "_collectives.all_gather": ("all_gather", "all_gather_cat"),
    "_collectives.all_to_all": ("all_to_all",),
    "_collectives.groups": ("barrier", "new_group", "node_group", "one_per_node_group"),
    "_collectives.rooted": ("broadcast", "gather"),
    "_collectives.scatter": ("scatter",),
    "_collectives.point_to_point": ("recv", "send"),
    "_collectives.reduce": ("all_reduce", "all_reduce_"),
    "_collectives.reduce_scatter": ("reduce_scatter",),
    "_collectives.reduce_to_one": ("reduce",),
    "_comm.group": ("Group",),
    "_comm.group_rank": ("GroupRank",),
    "_comm.work": ("Work",),
    "_environment.detect": ("detect", "launchers"),
    "_environment.facts": ("LaunchEnvironment",),
    "errors": (
        "CollectiveError",
        "CollectiveTimeoutError",
        "InvalidArgumentError",
        "JoinError",
        "JoinTimeoutError",
        "LaunchError",
        "LaunchTimeoutError",
        "LauncherEnvironmentError",
        "MismatchError",
        "MissingDependencyError",
        "NotJoinedError",
        "PayloadTypeError",
        "RankFailedError",
        "RankFailure",
        "RankwiseError",
        "RemoteRankError",
        "StoreError",
        "StoreTimeoutError",
        "TopologyError",
    ),
    "_launch.functions": ("launch",),
    "_session.getters": (
        "backend",
        "device",
        "explain",
        "get_local_rank",
        "get_local_world_size",
        "get_node_rank",
        "get_num_nodes",
        "get_rank",
        "get_world_size",
        "hostname",
        "is_rank_zero",
        "restart_count",
        "store",
        "topology",
    ),
    "_session.progress_report": ("report_progress",),
    "_session.api": ("finalize", "init"),
    "_session.key_value_store": ("Store",),
    "_session.current": ("is_joined",),
    "_session.session": ("Session",),
    "_trace.lateness": ("Lateness",),
    "topology": ("Topology",),
    "_training.rank_control": ("in_rank_order", "one_rank_only", "rank_zero_first", "rank_zero_only"),
    "_training.random_streams": ("random_state", "random_streams", "same_seed", "seed", "set_random_state"),
    "_training.checkpoints": ("Checkpoints",),
    "_training.gradients": ("sync_grads",),
    "_training.parameters": ("sync_buffers", "sync_params"),
    "_training.metrics": ("Metrics",),
    "_training.rank_zero_output": ("on_rank_zero", "print", "progress"),
    "_training.stopping": ("Stop",),
    "_training.synced_values": ("assert_synced",),
    "_training.gradient_clipping": ("clip_grad_norm_",),
    "_training.module_wrappers": ("no_sync", "wrap_ddp"),
}
# The compiler of torch would follow calls of these functions into the exchange of frames, and fail there.
_WITH_COLLECTIVES = ("_collectives.", "_training.")
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is not None:
        value = getattr(_imported(f"{__name__}.{home}", f"{__name__}.{name}"), name)
        if home.startswith(_WITH_COLLECTIVES) and not isinstance(value, type):
            from rankwise._torch import run_uncompiled  # noqa: PLC0415 - getters do not need it

            run_uncompiled(value)
    elif name == "data":
        value = _imported(f"{__name__}.data", f"{__name__}.data")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__", "data"])


def _imported(home: str, name: str) -> ModuleType:
    """Import the module that a public name is in.

    Raises:
        MissingDependencyError: It imports torch, or a module of POSIX systems, and there is none.
    """
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "fcntl"}:
            raise
        from rankwise._dependencies import missing_posix, missing_torch  # noqa: PLC0415 - not needed where there is one

        raise (missing_torch if error.name == "torch" else missing_posix)(name) from None


def _version() -> str:
    """Return the version that this package was installed as.

    Raises:
        AttributeError: It was not installed, but copied.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow to import

    try:
        return version(__name__)
    except PackageNotFoundError:
        raise AttributeError(
            f"{__name__}.__version__ is not known: the package was copied to {__path__[0]}, and not installed"
        ) from None


# This submodule shares its name with a public function. Loaded now, it does not take the name over later.
importlib.import_module(f"{__name__}.topology")
del globals()["topology"]
