"""Print a line on each stream; rank 1 raises an exception once rank 0 has printed."""

import os
import sys
import time
from pathlib import Path

print("out", os.environ["RANK"], flush=True)
print("err", os.environ["TORCHELASTIC_ERROR_FILE"].rsplit("/", 2)[1], file=sys.stderr)
has_printed = Path(sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "0":
    has_printed.touch()
else:
    while not has_printed.exists():
        time.sleep(0.01)
    raise ValueError("no data")
