"""One of two processes that make themselves ranks, as those do that virtex's launch would start."""

import sys

import rankwise as rw
from rankwise._session.current import current_session
from rankwise.compat import virtex as dist


def job(number: int) -> None:
    total = rw.all_reduce(dist.get_rank() + number)
    print(f"{dist.get_rank()} of {dist.get_world_size()}: {total}, met at {current_session().reading.port}")


dist._job_worker(int(sys.argv[1]), job, 2, 2, 0, sys.argv[2], (1,))
