"""PyTorch-Ignite itself, to compare with."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # What it imports of torch is deprecated there.
    warnings.simplefilter("ignore")
    import ignite
    import ignite.distributed as original

__all__ = ["ignite", "original"]
