"""A process that joins as its arguments specify, and prints its ranks and sizes as JSON.

The first argument names the opener of the process group, the second one is its arguments.
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
report: dict[str, Any] = {"before": idist.get_rank()}


def getters_report() -> dict[str, Any]:
    """Return the values of the getters; the first part of the message of a getter that raises."""
    values: dict[str, Any] = {}
    for name in ("rank", "world_size", "local_rank", "nproc_per_node", "nnodes", "node_rank"):
        try:
            values[name] = getattr(idist, f"get_{name}")()
        except rw.NotJoinedError as error:
            values[name] = str(error).partition(";")[0]
    return values | {"backend": idist.backend(), "model": idist.model_name(), "device": str(idist.device())}


if how == "initialize":
    if "timeout" in arguments:
        arguments["timeout"] = timedelta(seconds=arguments["timeout"])
    try:
        idist.initialize(**arguments)
    except rw.RankwiseError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    report |= getters_report()
elif how == "torch":
    hint = arguments.pop("hint", None)
    if hint is not None:
        idist.set_local_rank(int(os.environ["HINT"]))
    dist.init_process_group(**arguments, rank=int(os.environ["TRUE_RANK"]), world_size=int(os.environ["TRUE_SIZE"]))
    if dist.get_rank() == 0:
        report |= getters_report()  # on one rank alone: a getter never communicates
    idist.sync()
    report["after sync"] = getters_report()
report["total"] = idist.all_reduce(torch.ones(1)).item()
idist.finalize()
idist.finalize()  # once more does nothing
report["left"] = [dist.is_initialized(), idist.model_name(), idist.get_world_size(), sys.excepthook is hook]
report["environment is as it was"] = dict(os.environ) == before
print(json.dumps(report))
