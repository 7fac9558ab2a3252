"""Ranks reduce a large tensor, and print whether they share memory, and the sum. They also send each other tensors.

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
    rank, size = rw.get_rank(), rw.get_world_size()
    for length in (100, 1_000_000):
        sent = rw.send(torch.full((length,), float(rank)), (rank + 1) % size, async_op=True)
        assert (rw.recv((rank - 1) % size) == (rank - 1) % size).all()
        sent.wait()
        pieces = rw.all_to_all([torch.full((length + other,), float(rank)) for other in range(size)])
        assert all((piece == src).all() and len(piece) == length + rank for src, piece in enumerate(pieces))
    shares = comm_of(None).planes.shared_memory is not None
    links = comm_of(None)._registry._links  # type: ignore[union-attr]  # it is connected
    num_data = len(links.connector.made)  # type: ignore[union-attr]  # likewise
    assert (num_data == 0) is shares
    print(shares)
