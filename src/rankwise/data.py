"""Data on several ranks: the order of samples, loops of one length, and results in the order of the dataset.

`GlobalBatches` is a batch sampler for a DataLoader: the same global batches for any number of ranks and workers, each
sample once, and a state to resume from. `shard` is for IterableDatasets and lists, `in_step` for the same number of
steps on all ranks, `in_order` for the results of an evaluation.
"""

from __future__ import annotations

from types import FunctionType
from typing import cast

from rankwise._data.global_batches import GlobalBatches
from rankwise._data.ordered_results import in_order
from rankwise._data.shards import shard
from rankwise._data.steps import in_step
from rankwise._torch import run_uncompiled

__all__ = ["GlobalBatches", "in_order", "in_step", "shard"]

# As the collectives of `rankwise`.
run_uncompiled(cast("FunctionType", in_order))
