"""Print many numbered lines on both streams."""

import os
import sys

rank = os.environ["RANK"]
for number in range(int(sys.argv[1])):
    print(f"{rank} {number}")
    if number % 10 == 0:
        print(f"{rank} {number}", file=sys.stderr)
