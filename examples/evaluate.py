"""Evaluate a model on any number of ranks, with the metrics of one process to the last digit.

    python examples/evaluate.py
    rankwise launch -n 4 examples/evaluate.py

Ranks take whole batches, which are the same for any number of ranks: the last digits of what a model returns for a
sample depend on the batch that it is computed in. The results come back in the order of the dataset, each once, so that
every metric may be computed from them; also one that is not a mean, such as the area under a curve.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import rankwise as rw

TEST_SAMPLES = 397
BATCH_SIZE = 32


def trained(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Return a model that is the same on all ranks, in place of one from a checkpoint."""
    with rw.same_seed(0):
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def main() -> None:
    torch.set_num_threads(1)  # as on several ranks of a host
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    with rw.init(device="cpu"):
        model = trained(images[TEST_SAMPLES:], labels[TEST_SAMPLES:])
        batches = list(BatchSampler(range(TEST_SAMPLES), BATCH_SIZE, drop_last=False))
        data = TensorDataset(torch.arange(TEST_SAMPLES), images[:TEST_SAMPLES])
        indices, outputs = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, 10)]
        with torch.no_grad():
            for index, image in DataLoader(data, batch_sampler=rw.data.shard(batches)):
                indices.append(index)
                outputs.append(model(image).softmax(dim=1))
        found = rw.data.in_order(torch.cat(indices), torch.cat(outputs), total=TEST_SAMPLES).double()
        if rw.is_rank_zero():
            found, truth = found / found.sum(dim=1, keepdim=True), labels[:TEST_SAMPLES]
            print(f"accuracy {accuracy_score(truth, found.argmax(dim=1))!r}")
            print(f"log loss {log_loss(truth, found)!r}")
            print(f"area under the curve {roc_auc_score(truth, found, multi_class='ovr')!r}")


if __name__ == "__main__":
    main()
