"""Train a small network on handwritten digits, on any number of ranks.

    python examples/digits.py
    rankwise launch -n 4 examples/digits.py
    torchrun --nproc-per-node=2 examples/digits.py --ddp
    mpirun -n 2 python examples/digits.py

The global batch is the same for any number of ranks, each training sample is used once an epoch, and each test sample
is evaluated exactly once: so the result hardly depends on how many ranks there are.
"""

from __future__ import annotations

import argparse
import os

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

TEST_SAMPLES = 400


def load(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return training images and labels, then those for testing: the same split on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    parts = images[TEST_SAMPLES:], labels[TEST_SAMPLES:], images[:TEST_SAMPLES], labels[:TEST_SAMPLES]
    return tuple(part.to(device) for part in parts)


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


def train(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, epochs: int, batch: int, learning_rate: float
) -> None:
    """Train on this rank's part of every global batch."""
    rank, world_size = rw.get_rank(), rw.get_world_size()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    shuffle = torch.Generator().manual_seed(0)
    for _ in track(range(epochs), "training", disable=not rw.is_rank_zero(), console=Console(stderr=True)):
        order = torch.randperm(len(labels), generator=shuffle).to(labels.device)
        for whole in order.split(batch):
            mine = whole[rank::world_size]
            # The sum over this rank's samples, as its share of the whole batch: parts need not be of one size, and the
            # mean over ranks, which sync_grads and DDP both take, is then the mean over samples.
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            optimizer.zero_grad()
            (loss * world_size / len(whole)).backward()
            if not isinstance(model, DistributedDataParallel):
                rw.sync_grads(model)
            optimizer.step()


def count_right(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return how many samples all ranks have evaluated, each its own part, and how many were right."""
    rank, world_size = rw.get_rank(), rw.get_world_size()
    with torch.no_grad():
        right = (model(images[rank::world_size]).argmax(dim=1) == labels[rank::world_size]).sum().item()
    return rw.all_reduce(len(labels[rank::world_size])), rw.all_reduce(int(right))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64, help="the global batch, over all ranks")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--ddp", action="store_true", help="let DistributedDataParallel average the gradients")
    parser.add_argument("--device", help='such as "cpu"; by default the accelerator of each rank, if it has one')
    options = parser.parse_args()

    with rw.init(device=options.device) as session:
        train_images, train_labels, test_images, test_labels = load(rw.device())
        model = build(rw.device())
        trained = DistributedDataParallel(model) if options.ddp else model
        train(trained, train_images, train_labels, epochs=options.epochs, batch=options.batch, learning_rate=options.lr)
        samples, right = count_right(model, test_images, test_labels)
        if rw.is_rank_zero():
            table = Table(title="digits")
            for name in ("ranks", "launcher", "gradients", "test samples", "right", "accuracy"):
                table.add_column(name, justify="right")
            averaged_by = "DDP" if options.ddp else "sync_grads"
            table.add_row(
                str(session.world_size),
                rw.detect(os.environ).launcher,
                averaged_by,
                str(samples),
                str(right),
                f"{right / samples:.2%}",
            )
            Console().print(table)


if __name__ == "__main__":
    main()
