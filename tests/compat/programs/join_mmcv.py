"""Join by `init_dist`, and print the environment after it. Errors of rankwise go to stderr in one line."""

import json
import multiprocessing
import os
import sys
from datetime import timedelta

import rankwise as rw
from rankwise.compat.mmcv import get_dist_info, init_dist

NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
multiprocessing.set_start_method(None, force=True)  # this program itself may have been forked
before = {name: os.environ.get(name) for name in NAMES}
options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
if "seconds" in options:
    options["timeout"] = timedelta(seconds=options.pop("seconds"))
try:
    init_dist(sys.argv[1], **options)
except rw.RankwiseError as error:
    assert before == {name: os.environ.get(name) for name in NAMES}, "published after joining only"
    sys.exit(f"{type(error).__name__}: {error}")
rank, world_size = get_dist_info()
told: dict[str, object] = {name: os.environ.get(name) for name in NAMES}
told |= {"rank": rank, "size": world_size, "total": rw.all_reduce(1), "ranks": rw.all_gather(rank)}
told["start method"] = multiprocessing.get_start_method(allow_none=True)
sys.stdout.write(json.dumps(told) + "\n")  # in one piece: several ranks share the pipe
