"""Start two workers of Ray Train on this host, which join and write to files in this folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import rankwise as rw


def train(config: dict[str, str]) -> None:
    launcher = rw.detect(os.environ).launcher
    with rw.init(timeout=100):
        found = {"launcher": launcher, "rank": rw.get_rank(), "local_rank": rw.get_local_rank()}
        found |= {"world_size": rw.get_world_size(), "total": rw.all_reduce(1)}
        Path(config["folder"], f"{rw.get_rank()}.out").write_text(json.dumps(found) + "\n")


folder = str(Path.cwd())
with TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # its sockets have paths of at most 107 bytes
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=short)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    ray.shutdown()
