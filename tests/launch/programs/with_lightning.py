"""Trains a little under Lightning, which finds that somebody else has started its ranks."""

import logging
import warnings

import lightning
import torch

warnings.simplefilter("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
trainer.fit(Model(), data)
strategy = trainer.strategy
assert isinstance(strategy, lightning.pytorch.strategies.DDPStrategy)
ranks = strategy.all_gather(torch.tensor(trainer.global_rank)).tolist()
print(trainer.world_size, ranks, type(strategy.cluster_environment).__name__)
