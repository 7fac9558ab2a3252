"""Saves one checkpoint after the other, each of a model and an optimizer that have its step everywhere."""

import sys
from itertools import count

import torch

import rankwise as rw

torch.set_num_threads(1)
folder, mode = sys.argv[1:]
with rw.init(), rw.Checkpoints(folder, keep=2) as saves:
    model = torch.nn.Linear(40, 50)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(40)).sum().backward()
    optimizer.step()
    first = saves.load(model=model, optimizer=optimizer)
    for step in count(0 if first is None else first + 1):
        with torch.no_grad():
            for value in (*model.parameters(), *(entry["exp_avg"] for entry in optimizer.state.values())):
                value.fill_(step)
        saves.save(step, async_op=mode == "async", model=model, optimizer=optimizer, step=step)
        if rw.is_rank_zero():
            print("saved", step, flush=True)
