"""Run a launch of steps.py on a terminal, and stop it when all ranks run: interrupted.py HOW FOLDER COMMAND...

HOW is "ctrl-c"; or the name of a signal for the command; or, for SIGKILL to one of its parts, "ssh" for the first ssh,
and "watchdog" and "launcher" for the last of these. Prints what the terminal has shown, and how it has ended.
"""

from __future__ import annotations

import os
import pty
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

PARTS = {"watchdog": "other_hosts.watchdog import", "launcher": "hosts.launcher import"}

how, folder, command = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
pid, terminal = pty.fork()
if pid == 0:
    os.execv(command[0], command)  # noqa: S606 - the command of the test
shown = bytearray()


def read() -> None:
    try:
        while piece := os.read(terminal, 4096):
            shown.extend(piece)
    except OSError:  # no process has the terminal any more
        return


reader = threading.Thread(target=read)
reader.start()
while not all((folder / f"4-0-{rank}").exists() for rank in range(4)):
    if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
        break
    time.sleep(0.1)
if how == "ctrl-c":
    os.write(terminal, b"\x03")
elif how == "ssh":
    next(child for child in psutil.Process(pid).children() if child.name() == "ssh").kill()
elif how in PARTS:
    [one for one in psutil.process_iter() if one.name() != "ssh" and PARTS[how] in " ".join(one.cmdline())][-1].kill()
else:
    os.kill(pid, signal.Signals[how])
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
reader.join(20)
print(shown.decode(errors="replace").replace("\r\n", "\n"))
print(f"ended with {status}")
