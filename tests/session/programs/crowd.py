"""Connect to a port as often as is asked for, say nothing, and stay until killed."""

import socket
import sys
import time

port, count = map(int, sys.argv[1:])
held: list[socket.socket] = []
while len(held) < count:
    try:
        held.append(socket.create_connection(("127.0.0.1", port), timeout=1.0))
    except OSError:
        time.sleep(0.01)
sys.stdin.read()
