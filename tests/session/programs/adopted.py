"""The program opens the process group itself; rankwise adopts it, and checks all the same."""

import torch
import torch.distributed as dist

import rankwise as rw

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = sum(range(size))
for again in range(2):
    if again:
        rw.init()
    for _ in range(3):
        try:
            rw.all_reduce(torch.ones(3 + (rank == 1)))
        except rw.MismatchError as error:
            print(str(error).splitlines()[0])
        assert rw.all_reduce({"rank": rank, "much": torch.full((50_000,), rank)})["rank"] == total
        dist.all_reduce(torch.ones(3))
    with rw.rank_zero_first():
        pass
    group = rw.new_group([0, 1])
    if rank < 2:
        assert rw.all_gather(rank, group=group) == [0, 1]
    rw.finalize()
    assert dist.is_initialized(), "what was found open is left open"
dist.destroy_process_group()
