"""What a user's script is: joins, talks, prints its arguments."""

import json
import os
import sys

import rankwise as rw

with rw.init(timeout=100.0):
    ranks = rw.all_gather(rw.get_rank())
    gathered = rw.gather({"argv": sys.argv[1:], "name": __name__, "threads": os.environ["OMP_NUM_THREADS"]})
    if rw.is_rank_zero():
        print(json.dumps([ranks, gathered]))
