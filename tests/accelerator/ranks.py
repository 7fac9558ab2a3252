"""Functions that run in ranks with a simulated device each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import rankwise as rw


def in_session(body: Callable[[rw.Session], Any], *, nproc: int = 2, timeout: float = 60.0, **init: Any) -> list[Any]:
    """Return the results of a function in a session of ranks, none of which uses another one's device, or races."""

    def run() -> Any:
        with rw.init(timeout=timeout, **init) as session:
            result = body(session)
            torch.accelerator.synchronize()
        own = torch.simdev.contexts()  # type: ignore[attr-defined]
        assert set(own) <= {rw.get_local_rank()}, own
        assert torch.simdev.races() == 0  # type: ignore[attr-defined]
        return result

    return rw.launch(run, nproc=nproc)


def error_of(call: Callable[[], Any]) -> str:
    """Return the class and the message of the error that a call raises."""
    try:
        call()
    except rw.RankwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ramp(device: torch.device, rank: int) -> torch.Tensor:
    """Return a tensor that differs between ranks."""
    return torch.arange(4.0, device=device) + rank
