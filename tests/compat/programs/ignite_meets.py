"""One host of two: starts its ranks, which join those of the other host. The arguments are its number and a port."""

import os
import sys
from typing import Any

import torch

import rankwise.compat.ignite as idist


def tell(local_rank: int, *, greeting: str) -> None:
    """Say who this is, with everybody's rank."""
    torch.set_num_threads(1)
    ranks: Any = idist.all_gather(idist.get_rank())
    words = (greeting, idist.get_rank(), local_rank, idist.get_world_size(), sum(ranks), os.environ["RANK"])
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


if __name__ == "__main__":
    node_rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    nodes: dict[str, Any] = {"nproc_per_node": 2, "nnodes": 2, "node_rank": node_rank}
    if how == "init_method":
        idist.spawn("gloo", tell, (), {"greeting": "hello"}, init_method=f"tcp://127.0.0.1:{port}", **nodes)
    else:
        with idist.Parallel("gloo", master_addr="127.0.0.1", master_port=port, **nodes) as parallel:
            parallel.run(tell, greeting="hello")
