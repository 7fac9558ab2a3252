"""Views of tensors on XLA devices, whose strides do not show which elements share memory."""

from __future__ import annotations

import pytest
import torch

import rankwise as rw
from rankwise._comm.buffers import is_expanded

pytestmark = pytest.mark.ranks(1, 2, 4)


def test_expanded_tensors_are_known(session: rw.Session) -> None:
    row = torch.arange(6.0, device=session.device)
    expanded = row.expand(2, 6), row[:2].expand(3, 2), row[:1].expand(4).reshape(2, 2), row.expand(2, 6).detach()
    # torch_xla writes to some of these as if they had no gaps.
    windows = row.as_strided((3, 2), (1, 1)), row.as_strided((2, 2), (3, 1)), row.unfold(0, 3, 2), row.unfold(0, 2, 3)
    for shared in (*expanded, *windows):
        assert is_expanded(shared)
        with pytest.raises(rw.PayloadTypeError, match="is expanded"):
            rw.all_reduce_(shared)
        assert rw.all_reduce(shared).tolist() == (shared * session.world_size).tolist()
    for own in (row, row.expand(1, -1), row[2:], row.reshape(2, 3).t(), row.expand(2, 6).clone(), row.detach()):
        assert not is_expanded(own)
        wanted = (own * session.world_size).tolist()
        assert rw.all_reduce_(own.clone()).tolist() == wanted
        assert own.tolist() == (torch.tensor(wanted) / session.world_size).tolist()
        assert rw.all_reduce_(own).tolist() == wanted
        rw.all_reduce_(own, op="mean")
        own.copy_(own / session.world_size)


def test_gradients_that_autograd_has_expanded_are_averaged(session: rw.Session) -> None:
    """Autograd takes the gradient of a sum as it is: an expanded tensor."""
    size = session.world_size
    weight = torch.nn.Parameter(torch.ones(3, 2, device=session.device))
    (weight.sum() * (session.rank + 1)).backward()
    rw.sync_grads([weight])
    assert weight.grad is not None
    assert weight.grad.tolist() == [[sum(range(1, size + 1)) / size] * 2] * 3
    weight.grad.add_(1)
    assert weight.grad.tolist() == [[sum(range(1, size + 1)) / size + 1] * 2] * 3


def test_sync_params_copies_to_expanded_buffers(session: rw.Session) -> None:
    module = torch.nn.Module()
    row = torch.full((2,), float(session.rank), device=session.device)
    module.register_buffer("mask", row.expand(3, 2))
    module.register_buffer("row", row.expand(1, 2))
    rw.sync_params(module, src=session.world_size - 1)
    assert module.get_buffer("mask").tolist() == [[session.world_size - 1.0] * 2] * 3
    assert module.get_buffer("row").tolist() == [[session.world_size - 1.0] * 2]
