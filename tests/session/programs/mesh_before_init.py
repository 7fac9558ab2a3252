"""Groups of torch that are older than the session are passed before it, in it and after it; then one rank is killed."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rankwise as rw

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
dp, tp, pair = mesh["dp"], mesh["tp"], dist.new_group([0, 1])
for _ in range(2):
    for group in (mesh, tp, pair):
        assert rw.all_gather(rw.get_rank(), group=group) == [0, 1]
    with rw.init():
        for group in (mesh, tp, pair):
            assert rw.all_gather(rw.get_rank(), group=group) == [0, 1]
        assert rw.all_gather(rw.get_rank(), group=dp) == [rw.get_rank()]
        with rw.new_group([0, 1]) as ours:
            assert rw.all_reduce(1, group=ours) == 2
rw.barrier()
if rw.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for group in (pair, tp):
    try:
        rw.all_reduce(1, group=group)
    except rw.CollectiveError as error:
        print(error)
dist.destroy_process_group()
for group in (mesh, tp, pair):
    try:
        rw.all_reduce(1, group=group)
    except rw.NotJoinedError:
        pass
    else:
        raise AssertionError
