"""Run a program on two ranks, while a socket on the port of name servers receives lookups, and never answers them."""

import os
import socket
import subprocess
import sys

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
    silent.bind(("127.0.0.1", 53))
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv[1:]], env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
