"""Prints lines of a thousand characters, as many as the argument says; a thread tells when it cannot go on."""

import os
import sys
import threading

lines = int(sys.argv[1])
printed = 0
ended = threading.Event()


def watch() -> None:
    seen = -1
    while not ended.wait(0.5):
        if printed == seen:
            sys.stderr.write(f"waits {printed < lines}\n")
            return
        seen = printed


watching = threading.Thread(target=watch)
watching.start()
for _ in range(lines):
    print(os.environ["RANK"] * 999)
    printed += 1
ended.set()
watching.join()
