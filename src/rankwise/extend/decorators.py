"""Decorators of functions that some ranks call, for packages with other rules than those of `rank_zero_only`."""

from __future__ import annotations

from rankwise._training.rank_control import called_on_rank_zero

__all__ = ["called_on_rank_zero"]
