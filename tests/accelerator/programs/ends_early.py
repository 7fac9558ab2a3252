"""Rank 1 ends without leaving the session, while rank 0 still computes."""

import time

import torch

import rankwise as rw

session = rw.init(timeout=100.0)
rw.all_reduce(torch.ones(3, device=session.device)).sum().item()
if session.rank == 0:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        torch.ones(3, device=session.device).sum().item()
