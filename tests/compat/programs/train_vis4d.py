"""Train and evaluate, as vis4d's trainer and evaluator do, in a process group that the program opens itself."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from vis4d.common.distributed import (
    all_gather_object_cpu,
    all_gather_object_gpu,
    all_reduce_dict,
    broadcast,
    distributed_available,
    get_local_rank,
    get_rank,
    get_world_size,
    is_module_wrapper,
    rank_zero_only,
    reduce_mean,
    synchronize,
)


@rank_zero_only  # type: ignore[untyped-decorator]  # the original has no types
def show(text: str) -> None:
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tmpdir")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if get_world_size() > 1:
        dist.init_process_group("gloo")
    seed = broadcast({"seed": 7} if get_rank() == 0 else None)["seed"]
    torch.manual_seed(seed)
    model: nn.Module = nn.Linear(4, 1)
    if distributed_available():
        model = nn.parallel.DistributedDataParallel(model)
    assert is_module_wrapper(model) == distributed_available()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 4)[get_rank() :: get_world_size()]
    for _ in range(50):
        loss = (model(data) - data.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = all_reduce_dict({"loss": loss.detach(), "count": torch.tensor(len(data))}, reduce_op="sum")
    samples = reduce_mean(torch.tensor(float(len(data))))
    synchronize()
    predictions = {"rank": get_rank(), "local": get_local_rank(), "boxes": data.sum(1)}
    for gathered in (
        all_gather_object_cpu(predictions, args.tmpdir),
        all_gather_object_gpu(predictions, rank_zero_return_only=True),
    ):
        assert (gathered is None) == (get_rank() != 0)
        if gathered is not None:
            assert [part["rank"] for part in gathered] == list(range(get_world_size()))
            assert sum(len(part["boxes"]) for part in gathered) == 64
    show(f"of {get_world_size()}: {int(metrics['count'])} seen, {samples:.0f} each")
    if distributed_available():
        dist.destroy_process_group()
    assert "MASTER_PORT" in os.environ or get_world_size() == 1


if __name__ == "__main__":
    main()
