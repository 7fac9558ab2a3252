"""Meet, with no more descriptors on rank zero than are asked for, and print how that went."""

import os
import resource
import sys
import time

from rankwise._environment.detect import detect
from rankwise._rendezvous import handshake
from rankwise._rendezvous.endpoint import Endpoint
from rankwise._rendezvous.membership import JoinRequest
from rankwise.errors import JoinError

reading = detect(os.environ)
port = int(os.environ["MASTER_PORT"])
where = Endpoint(host="127.0.0.1", ports=(port,), source="it", key="it", agent_store=False, one_host=True)
request = JoinRequest.of(reading, host="here", host_id="", process=os.getpid(), check=False, problem="")
try:
    if request.rank:
        time.sleep(1.0)  # let strangers be there first
        answer = handshake.connect(where, request, timeout=float(sys.argv[2]))[0]
    else:
        highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 - of this process
        while os.dup(0) < highest:
            """Leave no gap below it."""
        # Besides those for ranks: the socket that listens, and what waits for it.
        limit = os.dup(0) + 1 + int(sys.argv[1]) + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        answer = handshake.serve(handshake.listen_at(where), where, request, store_port=1, timeout=20.0)[0]
    print(f"JoinError: {answer.error}" if answer.error else "met")
except JoinError as error:
    print(f"JoinError: {error}")
