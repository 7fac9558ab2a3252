"""The first attempt starts a process in a session of its own, and fails; the second one looks for that process."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

note = Path(sys.argv[1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    note.write_text(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    sys.exit(3)
print("still there" if psutil.pid_exists(int(note.read_text())) else "gone")
