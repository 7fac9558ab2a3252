"""Print a line on each stream; rank 1 raises an exception."""

import os
import sys

print("out", os.environ["RANK"])
print("err", os.environ["TORCHELASTIC_ERROR_FILE"].rsplit("/", 2)[1], file=sys.stderr)
if os.environ["RANK"] == "1":
    raise ValueError("no data")
