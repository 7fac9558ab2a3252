"""Train on handwritten digits: stop, resume and evaluate exactly, on any number of ranks.

    rankwise launch -n 2 examples/train.py runs/digits
    rankwise launch -n 2 examples/train.py runs/digits    # after Ctrl-C, SIGTERM or SIGKILL: goes on

It goes on with the same numbers: as many ranks end with the bits of a run that was not interrupted. Other numbers of
ranks train on the same global batches.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw

TEST_SAMPLES = 397


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return images and labels to train on, and others for testing: the same split on every rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)[order]
    return (
        TensorDataset(images[TEST_SAMPLES:], labels[TEST_SAMPLES:]),
        TensorDataset(images[:TEST_SAMPLES], labels[:TEST_SAMPLES]),
    )


def evaluate(model: nn.Module, dataset: TensorDataset) -> float:
    """Return the share of right answers: each sample counts once, whatever the number of ranks."""
    model.eval()
    mine = torch.tensor(rw.data.shard(range(len(dataset))))
    images, labels = dataset[mine]
    with torch.no_grad():
        right = model(images.to(rw.device())).argmax(dim=1).cpu() == labels
    model.train()
    return float(rw.data.in_order(mine, right, total=len(dataset)).double().mean())


def train(options: argparse.Namespace) -> None:
    training, testing = load()
    with rw.same_seed(options.seed):  # the same initial values on all ranks
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Dropout(options.dropout), nn.Linear(128, 10)
        model = nn.Sequential(*layers).to(rw.device())
    rw.seed(options.seed)  # other numbers on each rank: dropout
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    # The batch size is that of all ranks together, and each rank gets its part.
    sampler = rw.data.GlobalBatches(len(training), options.batch, seed=options.seed, drop_last=True)
    loader = DataLoader(training, batch_sampler=sampler, num_workers=options.workers)
    metrics = rw.Metrics()
    with rw.Checkpoints(options.folder) as saves, rw.Stop() as stop:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
        step = saves.load(**parts) or 0
        rw.print(f"begins at step {step}, in epoch {sampler.epoch}", flush=True)
        while sampler.epoch < options.epochs:
            for images, labels in rw.data.in_step(loader):
                loss = nn.functional.cross_entropy(
                    model(images.to(rw.device())), labels.to(rw.device()), reduction="sum"
                )
                optimizer.zero_grad()
                # The parts of ranks may differ by one sample: with this factor the mean over ranks, which sync_grads
                # takes, is the mean over the samples of the global batch.
                (loss * rw.get_world_size() / options.batch).backward()
                rw.sync_grads(model)
                optimizer.step()
                metrics.add(loss=(loss, len(labels)))
                step += 1
                is_last = stop.agreed()
                if is_last or step % options.save_every == 0:
                    saves.save(step, **parts)
                    rw.print(f"step {step}: loss {metrics.compute()['loss']:.6f}, saved", flush=True)
                if is_last:
                    rw.print(f"stopped: {stop.reason}; the same command goes on", flush=True)
                    return
    accuracy = evaluate(model, testing)
    values = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    rw.print(f"accuracy {accuracy:.4f}, parameters {hashlib.sha256(values).hexdigest()[:16]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="the global batch, over all ranks")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="worker processes of each rank's loader")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    with rw.init():
        train(parser.parse_args())


if __name__ == "__main__":
    main()
