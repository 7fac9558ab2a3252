"""What the RAS service of NCCL says, from a server that speaks its protocol; NCCL itself needs several GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankwise._diagnose.nccl_ras import ask
from tests.session.worlds import free_port

HEAD = """\
NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  {status}

Errors
======

"""
FINE = HEAD.format(status="OK") + "Warnings\n========\n\n"
# By versions before 2.26, and since.
LAGGING_224 = (
    HEAD.format(status="MISMATCH")
    + """\
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  3 ranks have launched up to operation 6650
  Rank 2 has launched up to operation 6649 -- GPU 2 managed by process 4711 on node 172.16.64.210

"""
)
LAGGING_227 = (
    HEAD.format(status="MISMATCH")
    + """\
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  5 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 4710 on node 172.16.64.210
  Rank 3 -- GPU 3 managed by process 4713 on node 172.16.64.210
  Rank 4 has not launched any operations -- [process information not found]

"""
)
STOPPED = (
    HEAD.format(status="INCOMPLETE")
    + """\
INCOMPLETE
  Missing communicator data from 1 job process
  Process 4711 on node 172.16.64.213 managing GPU 1

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  The missing ranks: 1,3

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""
)


@contextlib.contextmanager
def server(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve one client, and give the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    handle(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"localhost:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def ras(answer: str) -> Callable[[socket.socket], None]:
    """Return the service: it answers commands line by line, and closes the connection after the status."""

    def handle(connection: socket.socket) -> None:
        for line in connection.makefile("r"):
            match line.strip().lower().split():
                case ["client", "protocol", "2"]:
                    connection.sendall(b"SERVER PROTOCOL 2\n")
                case ["timeout", number] if number.isdecimal():
                    connection.sendall(b"OK\n")
                case ["verbose", "status"]:
                    for start in range(0, len(answer), 100):
                        connection.sendall(answer[start : start + 100].encode())
                    return
                case _:
                    connection.sendall(f"ERROR: Unknown command {line}".encode())

    return handle


def test_the_ranks_that_lag_are_named() -> None:
    with server(ras(LAGGING_224)) as address:
        report = str(ask(address, 60)).splitlines()
    assert report[:2] == [
        f"NCCL RAS at {address}:",
        "  rank 2 of the communicator, process 4711 on node 172.16.64.210: 6649 of 6650 collective operations started",
    ]
    assert "    3 ranks have launched up to operation 6650" in report
    with server(ras(LAGGING_227)) as address:
        lines = str(ask(address, 60)).splitlines()[1:4]
    assert lines == [
        "  rank 0 of the communicator, process 4710 on node 172.16.64.210: 6649 of 6650 AllReduce operations started",
        "  rank 3 of the communicator, process 4713 on node 172.16.64.210: 6649 of 6650 AllReduce operations started",
        "  rank 4 of the communicator: 0 of 6650 AllReduce operations started",
    ]
    with server(ras(STOPPED)) as address:
        lines = str(ask(address, 60)).splitlines()
    assert lines[1] == "  ranks 1, 3: no answer from NCCL there"
    assert "    Process 4711 on node 172.16.64.213 managing GPU 1" in lines
    with server(ras(FINE)) as address:
        assert str(ask(address, 60)) == f"NCCL RAS at {address}: no errors or warnings"


def garbage(connection: socket.socket) -> None:
    """Answer as the service, and then with bytes for ever."""
    connection.sendall(b"SERVER PROTOCOL 2\n")
    connection.recv(100)
    connection.sendall(b"OK\n")
    block = b"\x1b[31mErrors\n======\n\n  Rank " + b"9" * 5000 + b" has launched up to operation " + b"9" * 5000 + b"\n"
    while True:
        connection.sendall(bytes(range(256)) * 256 + block)


def silence(connection: socket.socket) -> None:
    """Read until the client has given up."""
    while connection.recv(1 << 16):
        pass


ANSWERS: dict[str, Callable[[socket.socket], None]] = {
    "another service": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "no newline": lambda connection: connection.sendall(b"x" * 100_000),
    "its end": socket.socket.close,
    "garbage": garbage,
    "silence": silence,
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_of_anything_else_are_no_errors(kind: str) -> None:
    with server(ANSWERS[kind]) as address:
        report = ask(address, 0.3 if kind == "silence" else 60)
    text = str(report)
    assert text.startswith(f"NCCL RAS at {address}: ")
    assert all(character.isprintable() or character == "\n" for character in text)
    assert len(text.splitlines()) < 60


def test_without_a_service() -> None:
    assert "nothing listens there" in str(ask(f"127.0.0.1:{free_port()}", 60))
    for address in ("", "host", "localhost:http", "localhost:99999999999999999999", "[::1:0", "\0:1", "a" * 300 + ":1"):
        assert "no answer" in str(ask(address, 60)) or "nothing listens" in str(ask(address, 60)), address


def test_stacks_asks_the_service_of_a_job_that_has_loaded_nccl(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0" * 4096)
    code = (
        "import mmap, sys, time\n"
        "with open(sys.argv[1]) as file: mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print(flush=True)\n"
        "time.sleep(600)"
    )
    with server(ras(LAGGING_224)) as address:
        variables = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "NCCL_RAS_ADDR": address,
        }
        command = [sys.executable, "-c", code, str(library)]
        with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                stacks = [sys.executable, "-m", "rankwise", "stacks", str(process.pid)]
                done = subprocess.run(stacks, capture_output=True, text=True, check=False, timeout=200)
            finally:
                process.kill()
    assert done.returncode == 0, done.stderr
    assert "rank 2 of the communicator, process 4711" in done.stdout
