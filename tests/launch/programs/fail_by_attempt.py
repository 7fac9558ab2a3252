"""Rank 0 reports a step, and fails; in each attempt as the argument says: "8:ValueError 8:SIGKILL 9:return".

With "hang", the others cannot be stopped but by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import rankwise

step, end = sys.argv[1].split()[rankwise.restart_count()].split(":")
if end == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rankwise.init()
if rankwise.get_rank() != 0 and end != "return":
    time.sleep(300)
if step:
    thread = threading.Thread(target=rankwise.report_progress, args=(int(step),))
    thread.start()
    thread.join()
    rankwise.report_progress(int(step) - 1)  # ignored
if end == "SIGKILL":
    os.kill(os.getpid(), signal.SIGKILL)
if end != "return":
    raise ValueError(end)
