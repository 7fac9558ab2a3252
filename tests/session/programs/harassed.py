"""Join, the last rank late, and make groups, so that there is something to connect to for a while; print the sum."""

import os
import sys
import time

import rankwise as rw

groups, delay = int(sys.argv[1]), float(sys.argv[2])
try:
    if os.environ["RANK"] == "2":
        time.sleep(delay)
    with rw.init(timeout=100.0):
        for _ in range(groups):
            if rw.get_rank() == 2:
                time.sleep(0.05)
            rw.barrier(group=rw.new_group(range(rw.get_world_size())))
        sys.stdout.write(f"{rw.all_reduce(1)}\n")
except rw.RankwiseError as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\n")
