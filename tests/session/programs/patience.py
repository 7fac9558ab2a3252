"""One rank works for longer than the session's timeout, while the others wait for it."""

import time

import rankwise as rw

with rw.init(timeout=2.0):
    last = rw.get_world_size() - 1

    @rw.one_rank_only(last)
    def work() -> str:
        time.sleep(2.5)
        return "worked"

    assert work() == "worked"
    with rw.rank_zero_first():
        if rw.get_rank() == 0:
            time.sleep(2.5)
    rw.barrier()
    print("ok")
