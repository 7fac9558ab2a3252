"""A rank of a world fails as the argument specifies, while the others wait for it."""

import os
import signal
import sys
import time

import rankwise as rw
import rankwise.compat.ignite as idist
from rankwise._session.current import current_session


def work(local_rank: int, fault: str) -> None:
    """Fail on the last rank."""
    if idist.get_rank() == idist.get_world_size() - 1:
        if fault == "raise":
            raise ValueError("the loss is not a number")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "leave":
            sys.exit(0)
        while fault == "never come" and not current_session().comm.control.dead_ranks():
            time.sleep(0.05)
    idist.all_reduce(1)


fault = sys.argv[1]
try:
    # Only who waits in vain needs a limit, in which both have to have joined all the same.
    with idist.Parallel("gloo", timeout=10 if fault == "never come" else 60, start_method="fork") as parallel:
        parallel.run(work, fault)
except rw.CollectiveError as error:
    sys.exit(f"{type(error).__name__}: {error}")
finally:
    print(idist.model_name())
