import pytest
import torch

import rankwise as rw


def accuracy(predicted, wanted):
    """Return the share of correct answers over all ranks."""
    counts = {"right": int((predicted == wanted).sum()), "all": len(wanted)}
    counts = rw.all_reduce(counts)
    return counts["right"] / counts["all"]


@pytest.mark.ranks("serial", 1, 4)
def test_the_ranks_together_count_what_one_process_counts(session):
    with rw.same_seed(0):
        predicted, wanted = torch.randint(3, (101,)), torch.randint(3, (101,))
    mine = slice(session.rank, None, session.world_size)  # 101 samples on 4 ranks: 26, 25, 25, 25
    expected = float((predicted == wanted).double().mean())
    assert accuracy(predicted[mine], wanted[mine]) == pytest.approx(expected)


@pytest.mark.ranks(4)
def test_a_rank_may_have_no_samples(session):
    samples = torch.ones(0 if session.rank == 2 else 5)
    assert accuracy(samples, samples) == 1


@pytest.mark.ranks(4)
def test_every_rank_has_as_many_samples(session):
    samples = len(range(101)[session.rank :: session.world_size])
    assert samples == 26
