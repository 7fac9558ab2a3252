"""Train as detection projects do under their launcher: variables of the environment, and a group opened with env://."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--dataset")
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
torch.set_num_threads(1)
rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
dist.init_process_group("gloo", init_method="env://", world_size=world_size, rank=rank)
total = torch.ones(1)
dist.all_reduce(total)
dist.barrier()
print(f"{rank} of {int(total)}: local {local_rank}, told {args.local_rank}, on {args.dataset}")
dist.destroy_process_group()
