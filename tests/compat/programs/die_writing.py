"""Gather through files, and let one rank be killed while it writes its own."""

import os
import signal
import sys

import rankwise as rw
from rankwise.compat import vis4d

folder, dying = sys.argv[1], int(sys.argv[2])


class Deadly:
    """A value that ends the process that pickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        os.kill(os.getpid(), signal.SIGKILL)
        return ()


rw.init(timeout=100.0)
try:
    vis4d.all_gather_object_cpu(Deadly() if vis4d.get_rank() == dying else "fine", folder)
except rw.RankwiseError as error:
    print(f"{type(error).__name__}: {error}")
