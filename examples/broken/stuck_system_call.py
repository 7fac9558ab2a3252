"""A system call that does not return: rank 1 opens a pipe into which nobody writes, as a dead network disk behaves.

Run with: torchrun --nproc-per-node 3 examples/broken/stuck_system_call.py
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def read_labels(path: Path) -> str:
    """Return the labels: the call that does not return."""
    with open(path) as file:  # noqa: PTH123 - the simplest system call
        return file.read()


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("training", flush=True)
    if dist.get_rank() == 1:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "labels"
            os.mkfifo(path)
            path.with_name("pid").write_text(read_labels(path))
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
