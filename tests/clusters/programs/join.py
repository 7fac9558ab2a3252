"""Join, with the timeout of the first argument."""

from __future__ import annotations

import sys

import rankwise as rw

with rw.init(timeout=float(sys.argv[1])):
    rw.barrier()
