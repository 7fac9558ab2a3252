"""Tests in worlds of four ranks: processes spawned by each test, as most projects do it."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def body(rank: int, port: int, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    tensor = torch.full((1,), float(number))
    dist.all_reduce(tensor)
    assert tensor.item() == number * 4
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(int(os.environ["TESTS"])))
def test_all_reduce(number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    mp.spawn(body, args=(port, number), nprocs=4)
