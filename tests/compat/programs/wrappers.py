"""Wrap modules in classes whose import is slow, and print whether each is recognized as a wrapper."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import rankwise as rw
from rankwise.compat import vis4d

with rw.init():
    mesh = init_device_mesh("cpu", (rw.get_world_size(),))
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    compiled: nn.Module = torch.compile(nn.Linear(4, 4), backend="eager")  # type: ignore[assignment]  # a module it is
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh)
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)  # its own wants an accelerator
    print(*(vis4d.is_module_wrapper(nn.Sequential(module)) for module in (replicated, compiled, sharded, wrapped)))
