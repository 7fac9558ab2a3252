"""One script, any number of ranks.

Public names are loaded when they are first used, so that `import rankwise` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.collectives.gathering import all_gather as all_gather
    from rankwise.collectives.gathering import all_gather_cat as all_gather_cat
    from rankwise.collectives.groups import barrier as barrier
    from rankwise.collectives.groups import new_group as new_group
    from rankwise.collectives.groups import node_group as node_group
    from rankwise.collectives.movement import broadcast as broadcast
    from rankwise.collectives.movement import gather as gather
    from rankwise.collectives.movement import scatter as scatter
    from rankwise.collectives.reduction import all_reduce as all_reduce
    from rankwise.collectives.reduction import all_reduce_ as all_reduce_
    from rankwise.collectives.reduction import reduce_scatter as reduce_scatter
    from rankwise.comm.comm import Comm as Comm
    from rankwise.environment.detect import detect as detect
    from rankwise.environment.reading import Reading as Reading
    from rankwise.errors import CollectiveError as CollectiveError
    from rankwise.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from rankwise.errors import InvalidArgumentError as InvalidArgumentError
    from rankwise.errors import JoinError as JoinError
    from rankwise.errors import JoinTimeoutError as JoinTimeoutError
    from rankwise.errors import LauncherEnvironmentError as LauncherEnvironmentError
    from rankwise.errors import LaunchError as LaunchError
    from rankwise.errors import MismatchError as MismatchError
    from rankwise.errors import NotJoinedError as NotJoinedError
    from rankwise.errors import PayloadTypeError as PayloadTypeError
    from rankwise.errors import RankFailedError as RankFailedError
    from rankwise.errors import RankwiseError as RankwiseError
    from rankwise.errors import RemoteRankError as RemoteRankError
    from rankwise.errors import TopologyError as TopologyError
    from rankwise.launch.functions import launch as launch
    from rankwise.session.identity import backend as backend
    from rankwise.session.identity import device as device
    from rankwise.session.identity import explain as explain
    from rankwise.session.identity import get_local_rank as get_local_rank
    from rankwise.session.identity import get_local_world_size as get_local_world_size
    from rankwise.session.identity import get_node_rank as get_node_rank
    from rankwise.session.identity import get_num_nodes as get_num_nodes
    from rankwise.session.identity import get_rank as get_rank
    from rankwise.session.identity import get_world_size as get_world_size
    from rankwise.session.identity import hostname as hostname
    from rankwise.session.identity import is_rank_zero as is_rank_zero
    from rankwise.session.identity import topology as topology
    from rankwise.session.joining import finalize as finalize
    from rankwise.session.joining import init as init
    from rankwise.session.session import Session as Session
    from rankwise.topology import Topology as Topology
    from rankwise.training.control import in_rank_order as in_rank_order
    from rankwise.training.control import one_rank_only as one_rank_only
    from rankwise.training.control import rank_zero_first as rank_zero_first
    from rankwise.training.control import rank_zero_only as rank_zero_only
    from rankwise.training.gradients import sync_grads as sync_grads
    from rankwise.training.gradients import sync_params as sync_params

_HOMES = {
    "collectives.gathering": ("all_gather", "all_gather_cat"),
    "collectives.groups": ("barrier", "new_group", "node_group"),
    "collectives.movement": ("broadcast", "gather", "scatter"),
    "collectives.reduction": ("all_reduce", "all_reduce_", "reduce_scatter"),
    "comm.comm": ("Comm",),
    "environment.detect": ("detect",),
    "environment.reading": ("Reading",),
    "errors": (
        "CollectiveError",
        "CollectiveTimeoutError",
        "InvalidArgumentError",
        "JoinError",
        "JoinTimeoutError",
        "LaunchError",
        "LauncherEnvironmentError",
        "MismatchError",
        "NotJoinedError",
        "PayloadTypeError",
        "RankFailedError",
        "RankwiseError",
        "RemoteRankError",
        "TopologyError",
    ),
    "launch.functions": ("launch",),
    "session.identity": (
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
        "topology",
    ),
    "session.joining": ("finalize", "init"),
    "session.session": ("Session",),
    "topology": ("Topology",),
    "training.control": ("in_rank_order", "one_rank_only", "rank_zero_first", "rank_zero_only"),
    "training.gradients": ("sync_grads", "sync_params"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)


# These submodules share their names with public functions. Loaded now, they do not take the names over later.
for _name in ("launch", "topology"):
    importlib.import_module(f"{__name__}.{_name}")
    del globals()[_name]
