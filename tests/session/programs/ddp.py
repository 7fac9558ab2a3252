"""Train one step with DDP, and check that the gradient is the mean over ranks."""

import torch
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

with rw.init(timeout=100.0):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.full((1, 2), float(rw.get_rank()))).sum().backward()
    mean = (rw.get_world_size() - 1) / 2
    if model.weight.grad is not None and model.weight.grad.tolist() == [[mean, mean]]:
        print("synced")
