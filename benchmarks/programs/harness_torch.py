"""Tests in worlds of four ranks: the harness that torch tests itself with, which spawns processes for each test too."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


class AllReduce(MultiProcessTestCase):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def body(self, number: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        tensor = torch.full((1,), float(number))
        dist.all_reduce(tensor)
        assert tensor.item() == number * self.world_size
        dist.destroy_process_group()


for _number in range(int(os.environ["TESTS"])):
    setattr(AllReduce, f"test_all_reduce_{_number}", lambda self, number=_number: self.body(number))
