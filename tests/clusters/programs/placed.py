"""Join, and show where this rank is: by what rankwise has found out, and by the name of the host, which it is told."""

from __future__ import annotations

import json
import os
import socket
import sys

import rankwise as rw

if "early" in sys.argv[1:]:  # as a program does that uses MPI itself
    from mpi4py import MPI

try:
    with rw.init(timeout=float(os.environ.get("JOIN_SECONDS", "100"))):
        group = rw.new_group(range(rw.get_world_size()))
        seen = {
            "rank": rw.get_rank(),
            "world_size": rw.get_world_size(),
            "local_rank": rw.get_local_rank(),
            "local_world_size": rw.get_local_world_size(),
            "node_rank": rw.get_node_rank(),
            "num_nodes": rw.get_num_nodes(),
            "node": rw.node_group().ranks,
            "across": rw.one_per_node_group().ranks,
            "host": socket.gethostname(),
            "total": rw.all_reduce(1, group=group),
            "launcher": rw.detect(os.environ).launcher,
            "uses_mpi": "mpi4py.MPI" in sys.modules,
        }
        rw.barrier()
        if "early" in sys.argv[1:]:
            assert MPI.COMM_WORLD.allreduce(1) == rw.get_world_size(), "it is the program's to use, before and after"
        # In one piece, of less than what pipes take at once: several ranks share the pipe.
        sys.stdout.write(json.dumps(seen) + "\n")
except rw.RankwiseError as error:
    sys.exit(f"{type(error).__name__}: {error}")
