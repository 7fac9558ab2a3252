"""A job in which one rank comes late to each step: the rank, by how many seconds, the steps, and what it does then."""

import os
import signal
import sys
import time

import torch

import rankwise

LATE, SECONDS, STEPS, THEN = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def main() -> None:
    """Run the steps."""
    torch.set_num_threads(1)
    with rankwise.init(device="cpu", hang_report=2 if THEN == "stop" else None) as session:
        for _ in range(STEPS):
            time.sleep(SECONDS if session.rank == LATE else 0)
            rankwise.all_reduce(torch.ones(4))
        if session.rank == LATE and THEN in {"stop", "kill"}:
            os.kill(os.getpid(), signal.SIGSTOP if THEN == "stop" else signal.SIGKILL)
        rankwise.barrier()
        print(*session.lateness()[:1])


if __name__ == "__main__":
    main()
