"""Collectives in a backward pass: of tensors on a device, it runs in a thread of torch."""

from __future__ import annotations

import torch

import rankwise as rw
from tests.accelerator.ranks import error_of, in_session


def test_two_ranks_that_wait_for_each_other_in_two_groups() -> None:
    def body(session: rw.Session) -> str:
        group = rw.new_group([0, 1])
        x = torch.ones(3 + session.rank, device=session.device, requires_grad=True)
        loss = torch.stack([part.sum() for part in rw.all_gather(x, differentiable=True)]).sum()
        calls = [lambda: loss.backward(), lambda: rw.all_reduce(1, group=group)]  # noqa: PLW0108 - the line of this program
        return error_of(calls[session.rank])

    for error in in_session(body):
        assert error.startswith("MismatchError: deadlock: the ranks wait for each other in different groups:"), error
        assert "rank 0: the gradient of all_gather at test_backward.py:16," in error
        assert "rank 1: all_reduce at test_backward.py:16" in error


def test_a_call_of_a_hook_of_the_program_has_its_own_line() -> None:
    def body(session: rw.Session) -> str:
        x = torch.ones(3, device=session.device, requires_grad=True)
        x.register_hook(lambda gradient: rw.all_reduce(gradient, op="mean" if session.rank else "sum"))
        return error_of((2 * x).sum().backward)

    for error in in_session(body):
        assert error.startswith("MismatchError: "), error
        assert "rank 1: all_reduce(op='mean') at test_backward.py:28" in error
