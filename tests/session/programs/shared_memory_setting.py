"""Ranks reduce a large tensor, and print whether they share memory, and the sum.

With an argument, rank 1 has so little address space, or so few descriptors, that it cannot map more.
"""

import resource
import sys
from pathlib import Path

import torch

import rankwise as rw
from rankwise._collectives.groups import comm_of

torch.set_num_threads(1)
with rw.init(timeout=100):
    rw.barrier()
    limit = sys.argv[1] if len(sys.argv) > 1 else ""
    tensor = torch.ones(2_000_000)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if rw.get_rank() == 1 and limit == "memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
    if rw.get_rank() == 1 and limit == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())), 4096))
    try:
        print(rw.all_reduce_(tensor).sum(dtype=torch.float64).item())
    except rw.RankwiseError as error:
        print(f"{type(error).__name__} {error}".replace("\n", " "))
    resource.setrlimit(resource.RLIMIT_AS, before)
    print(rw.all_reduce_(torch.ones(2_000_000)).sum(dtype=torch.float64).item())
    print(comm_of(None).planes.shared_memory is not None)
