"""A rank that saves something at SIGTERM, which takes a second."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

folder, rank = Path(os.environ["TMPDIR"]), os.environ["RANK"]


def save(*_: object) -> None:
    time.sleep(1)
    (folder / f"saved-{rank}").touch()
    sys.exit()


signal.signal(signal.SIGTERM, save)
(folder / f"started-{rank}").touch()
while True:
    time.sleep(0.1)
