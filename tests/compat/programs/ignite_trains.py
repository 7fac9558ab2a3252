"""PyTorch-Ignite on rankwise: engines with metrics, checkpoints, loggers, loaders and a model, on any number of ranks.

How to start is the first argument: "alone", "env" for ranks that a launcher started, or the number of ranks to start.
The second is a folder. Rank zero prints the results, which are the same on any number of ranks, as JSON. With a third,
Ignite itself runs, without rankwise.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # Ignite imports deprecated names of torch

import rankwise.compat.ignite  # noqa: E402

ORIGINAL = len(sys.argv) > 3
if not ORIGINAL:
    rankwise.compat.ignite.install()

import torch  # noqa: E402
from ignite.contrib.engines import common  # noqa: E402
from ignite.engine import Engine, Events  # noqa: E402
from ignite.handlers import Checkpoint, DiskSaver, ModelCheckpoint, global_step_from_engine  # noqa: E402
from ignite.metrics import (  # noqa: E402
    Accuracy,
    ConfusionMatrix,
    EpochMetric,
    Frequency,
    Loss,
    Precision,
    Recall,
    RunningAverage,
)
from ignite.utils import setup_logger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

idist: Any = importlib.import_module("ignite.distributed")

SAMPLES, CLASSES, EPOCHS, BATCH = 48, 3, 2, 16


def share(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    """Return an epoch metric of all predictions and targets."""
    return float((predictions.argmax(dim=1) == targets).double().mean())


def data() -> TensorDataset:
    """Return the same data on all ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    noise = torch.randn(SAMPLES, CLASSES, generator=generator)
    return TensorDataset(inputs, (inputs[:, :CLASSES] + noise).argmax(dim=1))


def adapted_model() -> nn.Module:
    """Return a model that starts as rank zero's does; the others begin with something else."""
    torch.manual_seed(idist.get_rank())
    model = nn.Linear(4, CLASSES)
    if idist.get_rank() == 0:
        with torch.no_grad():
            model.weight.copy_(torch.eye(CLASSES, 4))
            model.bias.zero_()
    adapted: nn.Module = idist.auto_model(model)
    return adapted


def check_model(model: nn.Module) -> None:
    """Check that the model is the same on all ranks, and wrapped if there are several."""
    many = idist.get_world_size() > 1
    assert type(model).__name__ == ("DistributedDataParallel" if many else "Linear")
    for parameter in model.parameters():
        everybodys = idist.all_gather(parameter.detach()[None])
        assert (everybodys == everybodys[:1]).all()
    normed = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    try:
        assert idist.auto_model(normed, sync_bn=True) is normed
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    # The model was converted, and for that DDP wants a GPU.
    assert ("SyncBatchNorm" in refused) is many


def training(model: nn.Module, loader: Any) -> tuple[Engine, torch.optim.Optimizer]:
    """Return the engine that trains, with running metrics and Ignite's handler for a distributed sampler."""
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(_: Engine, batch: Any) -> dict[str, float]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return {"loss": loss.item()}

    trainer = Engine(step)
    RunningAverage(output_transform=lambda output: output["loss"]).attach(trainer, "running loss")
    Frequency(output_transform=lambda _: BATCH).attach(trainer, "frequency")
    common.setup_common_training_handlers(trainer, train_sampler=loader.sampler, with_gpu_stats=False, with_pbars=False)
    return trainer, optimizer


def evaluation(model: nn.Module) -> tuple[Engine, dict[str, Any]]:
    """Return the engine that evaluates, and its metrics."""
    evaluator = Engine(lambda _, batch: (model(batch[0]).detach(), batch[1]))
    metrics = {
        "accuracy": Accuracy(),
        "confusion": ConfusionMatrix(CLASSES),
        "epoch": EpochMetric(share),
        "loss": Loss(nn.CrossEntropyLoss()),
        "precision": Precision(average=False),
        "recall": Recall(average=True),
    }
    for name, metric in metrics.items():
        metric.attach(evaluator, name)
    return evaluator, metrics


def train(local_rank: int, place: str, *, closing: str = "") -> None:
    """Train and evaluate on all ranks."""
    torch.set_num_threads(1)
    assert sys.modules["ignite.distributed"] is idist, "in ranks that were spawned too"
    assert (idist is rankwise.compat.ignite) is not ORIGINAL
    assert local_rank == idist.get_local_rank() == idist.get_rank()
    folder = Path(place)
    model = adapted_model()
    check_model(model)
    loader = idist.auto_dataloader(data(), batch_size=BATCH, shuffle=False)
    trainer, optimizer = training(model, loader)
    evaluator, metrics = evaluation(model)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(loader))
    evaluator.logger = setup_logger("evaluator")

    saved = {"model": model, "optimizer": optimizer, "trainer": trainer}
    disk = DiskSaver(folder, require_empty=False)
    handler = Checkpoint(saved, disk, global_step_transform=global_step_from_engine(trainer))
    best = ModelCheckpoint(folder, "best", n_saved=1, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, best, {"model": model})
    state = trainer.run(loader, max_epochs=EPOCHS)

    with idist.one_rank_first():
        checkpoint = torch.load(folder / f"checkpoint_{EPOCHS}.pt", weights_only=False)
    Checkpoint.load_objects(to_load=saved, checkpoint=checkpoint)
    metrics["confusion"].load_state_dict(metrics["confusion"].state_dict())

    report = {name: torch.as_tensor(value).tolist() for name, value in evaluator.state.metrics.items()}
    report |= {"running loss": state.metrics["running loss"], "again": metrics["confusion"].compute().tolist()}
    report["files"] = sorted(path.name for path in folder.iterdir())
    assert all(other == report for other in idist.all_gather(report))
    if idist.get_rank() == 0:
        print(json.dumps(report | {"closing": closing}))


if __name__ == "__main__":
    how, place = sys.argv[1:3]
    arguments: dict[str, Any] = {} if how == "alone" else {"backend": "gloo"}
    if how.isdigit():
        arguments["nproc_per_node"] = int(how)
    with idist.Parallel(**arguments) as parallel:
        parallel.run(train, place, closing="bye")
