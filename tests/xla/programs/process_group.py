"""A program that opens a process group of torch_xla itself, as its documentation does, with one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401 - registers the backend

import rankwise as rw

dist.init_process_group("xla", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD
assert (rw.get_rank(), rw.get_world_size(), rw.all_gather("alone")) == (0, 1, ["alone"])
for arguments in ({"backend": "gloo"}, {"device": "cpu"}):
    with pytest.raises(rw.InvalidArgumentError, match="torch_xla has opened a process group"):
        rw.init(**arguments)  # type: ignore[arg-type]
    assert dist.group.WORLD is world, "it is not destroyed"
for arguments in ({}, {"backend": "xla"}):
    with rw.init(**arguments) as session:  # type: ignore[arg-type]
        assert (session.rank, session.world_size, session.backend) == (0, 1, "xla")
        assert rw.device() == torch.device("xla", 0)
        assert rw.all_reduce(3) == rw.all_reduce(3, group=world) == 3
        rw.barrier()
    assert dist.group.WORLD is world, "it stays open"
part = dist.new_group([0])
with rw.init(), pytest.raises(rw.InvalidArgumentError, match=r"make one with rankwise\.new_group"):
    rw.all_reduce(1, group=part)
print("done")
