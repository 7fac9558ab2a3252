"""Prints what it reads from standard input, and each signal that it gets, until SIGTERM."""

from __future__ import annotations

import os
import signal
import sys


def show(number: int, _: object) -> None:
    os.write(1, f"{signal.Signals(number).name}\n".encode())  # print() raises where the signal interrupts another one
    if number == signal.SIGTERM:
        sys.exit()


for each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTERM):
    signal.signal(each, show)
print(f"read {sys.stdin.read()!r}", flush=True)
while True:
    signal.pause()
