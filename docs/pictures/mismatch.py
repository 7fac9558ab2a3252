import torch

import rankwise as rw

with rw.init(device="cpu"):
    losses = torch.rand(4 if rw.is_rank_zero() else 3)
    rw.all_reduce(losses, op="mean")
