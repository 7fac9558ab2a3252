"""A loop of a framework with all parts of a training loop, none of which wraps anything of it.

framework_loops.py FRAMEWORK FOLDER

With SIGNAL in the environment, rank 1 signals itself in its fifth step. Each rank prints what it has as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw

LENGTH, BATCH_SIZE, EPOCHS, SIGNALLED = 96, 16, 2, 5


class Parts:
    """The data, and the parts around the steps."""

    def __init__(self, folder: str) -> None:
        rw.seed(0)
        with rw.same_seed(0):
            self.model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            inputs = torch.randn(LENGTH, 4)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.dataset = TensorDataset(torch.arange(LENGTH), inputs, inputs.sum(dim=1, keepdim=True))
        self.sampler = rw.data.GlobalBatches(LENGTH, BATCH_SIZE, seed=3)
        self.loader = DataLoader(self.dataset, batch_sampler=self.sampler)
        self.stop, self.metrics, self.saves = rw.Stop(), rw.Metrics(), rw.Checkpoints(folder)
        self.drawn = float(torch.rand(()))
        self.start = self.saves.load(model=self.model, optimizer=self.optimizer, sampler=self.sampler)
        self.step = self.start or 0
        self.loss = float("nan")

    def loss_of(self, module: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> torch.Tensor:
        _, inputs, targets = batch
        loss = torch.nn.functional.mse_loss(module(inputs), targets)
        self.metrics.add(loss=(loss.detach() * len(inputs), len(inputs)))
        return loss

    def ended_step(self) -> bool:
        """Take note of a step, and return whether to stop, after a save."""
        self.step += 1
        if self.step == SIGNALLED and rw.get_rank() == 1 and "SIGNAL" in os.environ:
            signal.raise_signal(signal.SIGUSR1)
        if not self.stop.agreed():
            return False
        self.saves.save(self.step, model=self.model, optimizer=self.optimizer, sampler=self.sampler)
        return True

    def print_results(self) -> None:
        order = rw.data.GlobalBatches(LENGTH, BATCH_SIZE, shuffle=False)
        places, outputs = [], []
        with torch.no_grad():
            for indices, inputs, _ in rw.data.in_step(DataLoader(self.dataset, batch_sampler=order)):
                places.append(indices)
                outputs.append(self.model(inputs))
        found = rw.data.in_order(torch.cat(places), torch.cat(outputs), total=LENGTH)
        loss = self.metrics.compute()["loss"]
        self.saves.close()
        self.stop.close()
        result = {"step": self.step, "start": self.start, "loss": loss, "outputs": found.flatten().tolist()}
        print(json.dumps({"rank": rw.get_rank(), "drawn": self.drawn, **result}), flush=True)


def plain(parts: Parts) -> None:
    model = torch.nn.parallel.DistributedDataParallel(parts.model)
    while parts.sampler.epoch < EPOCHS:
        for batch in rw.data.in_step(parts.loader):
            parts.optimizer.zero_grad()
            parts.loss_of(model, batch).backward()
            parts.optimizer.step()
            if parts.ended_step():
                return


def ignite(parts: Parts) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ignite.engine import Engine, Events  # noqa: PLC0415 - of this loop alone

    model = torch.nn.parallel.DistributedDataParallel(parts.model)

    def update(engine: Any, batch: Any) -> None:
        parts.optimizer.zero_grad()
        parts.loss_of(model, batch).backward()
        parts.optimizer.step()

    trainer = Engine(update)

    @trainer.on(Events.ITERATION_COMPLETED)
    def ended(engine: Any) -> None:
        parts.sampler.trained()
        if parts.ended_step():
            engine.terminate()

    while parts.sampler.epoch < EPOCHS and not parts.stop.reason:
        # Else it would begin the loader again, after a resume: __len__ is that of a whole epoch.
        trainer.run(parts.loader, max_epochs=1, epoch_length=parts.sampler.batches_left())


def accelerate(parts: Parts) -> None:
    from accelerate import Accelerator  # noqa: PLC0415 - of this loop alone

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(parts.model, parts.optimizer)
    while parts.sampler.epoch < EPOCHS:
        for batch in rw.data.in_step(parts.loader):
            optimizer.zero_grad()
            accelerator.backward(parts.loss_of(model, batch))
            optimizer.step()
            if parts.ended_step():
                return


def lightning(parts: Parts) -> None:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment  # noqa: PLC0415
    from lightning.pytorch import LightningModule, Trainer  # noqa: PLC0415 - of this loop alone

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def training_step(self, batch: Any) -> torch.Tensor:
            return parts.loss_of(self.model, batch)

        def on_train_batch_end(self, *_: object) -> None:
            parts.sampler.trained()
            if parts.ended_step():
                self.trainer.should_stop = True

        def configure_optimizers(self) -> Any:
            return parts.optimizer

    module = Module()
    while parts.sampler.epoch < EPOCHS and not parts.stop.reason:
        trainer = Trainer(
            accelerator="cpu", devices=rw.get_world_size(), strategy="ddp", plugins=[LightningEnvironment()],
            max_epochs=1, use_distributed_sampler=False, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, parts.loader)


LOOPS = {loop.__name__: loop for loop in (plain, ignite, accelerate, lightning)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    with rw.init():
        parts = Parts(sys.argv[2])
        LOOPS[sys.argv[1]](parts)
        parts.print_results()
