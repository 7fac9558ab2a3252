"""Join, but rank 1 asks for a device that there is not."""

import os
import sys

import rankwise as rw

try:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    with rw.init(timeout=float(sys.argv[1]), device="warp" if os.environ["RANK"] == "1" else None):
        pass
except rw.RankwiseError as error:
    sys.exit(f"{type(error).__name__}: {error}")
