"""A process that joins in the way that the arguments say, and tells who it is, as JSON.

The first argument is what opens the process group, the second one are arguments for it.
"""

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import rankwise as rw
import rankwise.compat.ignite as idist

torch.set_num_threads(1)
how, arguments = sys.argv[1], json.loads(sys.argv[2])
before = dict(os.environ)
hook = sys.excepthook
said: dict[str, Any] = {"before": idist.get_rank()}


def told() -> dict[str, Any]:
    """Return what the getters say; an error's first words where they cannot."""
    told: dict[str, Any] = {}
    for name in ("rank", "world_size", "local_rank", "nproc_per_node", "nnodes", "node_rank"):
        try:
            told[name] = getattr(idist, f"get_{name}")()
        except rw.NotJoinedError as error:
            told[name] = str(error).partition(";")[0]
    return told | {"backend": idist.backend(), "model": idist.model_name(), "device": str(idist.device())}


if how == "initialize":
    if "timeout" in arguments:
        arguments["timeout"] = timedelta(seconds=arguments["timeout"])
    try:
        idist.initialize(**arguments)
    except rw.RankwiseError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    said |= told()
elif how == "torch":
    hint = arguments.pop("hint", None)
    if hint is not None:
        idist.set_local_rank(int(os.environ["HINT"]))
    dist.init_process_group(**arguments, rank=int(os.environ["TRUE_RANK"]), world_size=int(os.environ["TRUE_SIZE"]))
    if dist.get_rank() == 0:
        said |= told()  # on one rank alone: a getter never talks
    idist.sync()
    said["after sync"] = told()
said["total"] = idist.all_reduce(torch.ones(1)).item()
idist.finalize()
idist.finalize()  # once more does nothing
said["left"] = [dist.is_initialized(), idist.model_name(), idist.get_world_size(), sys.excepthook is hook]
said["environment is as it was"] = dict(os.environ) == before
print(json.dumps(said))
