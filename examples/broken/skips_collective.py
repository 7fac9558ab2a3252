"""A rank skips a collective: rank 1 leaves out the step with a bad batch, in which the others reduce their gradients.

Run with: torchrun --nproc-per-node 3 examples/broken/skips_collective.py
"""

import torch
import torch.distributed as dist

STEPS = 5


def step(gradient: torch.Tensor, *, is_bad: bool) -> None:
    """Reduce a gradient, unless the batch is bad: that is the error, because the other ranks reduce theirs."""
    if is_bad:
        return
    dist.all_reduce(gradient)


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    evaluation = dist.new_group()
    for number in range(STEPS):
        step(torch.ones(1000), is_bad=dist.get_rank() == 1 and number == STEPS - 1)
    print("trained", flush=True)
    dist.all_reduce(torch.zeros(1), group=evaluation)


if __name__ == "__main__":
    main()
