import torch
import torch.distributed as dist


def load(shard: int) -> list[float]:
    if shard == 1:
        raise FileNotFoundError(f"data/shard-{shard}.bin")
    return [0.5, 0.25]


dist.init_process_group("gloo")
losses = load(dist.get_rank())
mean = torch.tensor(sum(losses))
dist.all_reduce(mean)
print(mean.item() / dist.get_world_size())
dist.destroy_process_group()
