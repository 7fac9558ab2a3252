"""Launch a function on hosts, then one that fails: on_ssh.py HOST..."""

from __future__ import annotations

import os
import socket
import sys

import psutil

import rankwise as rw


def who(missing: str = "") -> tuple[int, str, bool]:
    secret = os.environ["RANKWISE_SECRET"]
    with rw.init(timeout=100):
        if missing and rw.get_rank() == 3:
            raise KeyError(missing)
        rw.barrier()
        is_shown = any(secret in word for process in psutil.process_iter() for word in process.cmdline())
        rw.barrier()
        return rw.get_rank(), socket.gethostname(), is_shown


if __name__ == "__main__":
    print(rw.launch(who, nproc=2, hosts=sys.argv[1:]))
    try:
        rw.launch(who, "no such", nproc=2, hosts=sys.argv[1:])
    except rw.RankFailedError as failed:
        places = sorted((failure.rank, failure.host) for failure in failed.failures)
        print(f"{str(failed).splitlines()[0]}; {places}")
        print(repr(failed.__cause__))
