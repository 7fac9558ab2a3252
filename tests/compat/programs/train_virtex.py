"""Pretrain a linear model, as virtex's scripts do: one function, launched once for each GPU."""

import argparse

import torch
from torch import nn
from virtex.utils import distributed as dist


def main(args: argparse.Namespace) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Linear(4, 1).to(device)
    dist.synchronize()
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 4)[dist.get_rank() :: dist.get_world_size()].to(device)
    for _ in range(args.num_iterations):
        loss = (model(data) - data.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses = {"loss": loss.detach(), "rank": torch.tensor(float(dist.get_rank()), device=device)}
    dist.average_across_processes(losses)
    if dist.is_master_process():
        print(f"of {dist.get_world_size()}: rank {losses['rank']:.1f}, loss {losses['loss']:.3f}", dist.gpu_mem_usage())
    dist.synchronize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--num-gpus-per-machine", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0)
    parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
    parser.add_argument("--num-iterations", type=int, default=50)
    arguments = parser.parse_args()
    dist.launch(
        main,
        num_machines=arguments.num_machines,
        num_gpus_per_machine=arguments.num_gpus_per_machine,
        machine_rank=arguments.machine_rank,
        dist_url=arguments.dist_url,
        args=(arguments,),
    )
