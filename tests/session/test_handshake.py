"""How ranks find each other before there is a store: threads for ranks, real sockets, and strangers of every kind."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from rankwise._environment.detect import detect
from rankwise._environment.facts import Fact
from rankwise._net import acceptor
from rankwise._rendezvous import handshake, rank_zero
from rankwise._rendezvous.endpoint import Endpoint
from rankwise._rendezvous.membership import JoinReply, JoinRequest
from rankwise.errors import JoinError, JoinTimeoutError
from tests.session.worlds import PROGRAMS, free_port, plain, run_ranks


def endpoint(*ports: int, host: str = "127.0.0.1", key: str = "the same") -> Endpoint:
    return Endpoint(host=host, ports=ports, source="the test", key=key, agent_store=False, one_host=True)


def request(rank: int, world_size: int, **more: str) -> JoinRequest:
    reading = detect({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if "job" in more:
        reading = replace(reading, job=Fact(more["job"], "the launcher"))
    return JoinRequest.of(
        reading, host=more.get("host", "here"), host_id="", process=rank, check=False, problem=more.get("problem", "")
    )


def meet(where: Endpoint, requests: list[JoinRequest], *, timeout: float = 100.0) -> list[JoinReply | JoinError]:
    """Let ranks meet, and return each one's answer or error."""

    def one(own: JoinRequest) -> JoinReply | JoinError:
        try:
            if own.rank == 0:
                with handshake.listen_at(where) as listener:
                    answer, connections = handshake.serve(listener, where, own, store_port=1234, timeout=timeout)
                for connection in connections.values():
                    connection.close()
                return answer
            answer, connection = handshake.connect(where, own, timeout=timeout)
        except JoinError as error:
            return error
        connection.close()
        return answer

    with ThreadPoolExecutor(max_workers=len(requests)) as pool:
        return list(pool.map(one, requests))


@contextmanager
def stranger(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a program that is not ours on a port of its own."""
    stop = threading.Event()
    held: list[socket.socket] = []

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            held.append(connection)
            behave(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()
            for connection in held:
                connection.close()


ODD: list[dict[str, object]] = [
    {"rank": []},
    {"rank": "1"},
    {"rank": True},
    {"rank": 1.0},
    {"rank": -1},
    {"rank": 3},
    {"rank": 1 << 70},
    {"world_size": None},
    {"host": {}},
    {"host": ["x"]},
    {"check": 0},
    {"problem": None},
    {"process": "x"},
    {"more": 1},
]
STRANGERS = {
    "silent": lambda _: None,
    "closes": lambda connection: connection.close(),
    "web server": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "other proof": lambda connection: connection.sendall(b'{"proof": "0000"}\n'),
    "other JSON": lambda connection: connection.sendall(b'[{"proof": 1}]\n'),
    "not text": lambda connection: connection.sendall(b"\xff\xfe\n"),
    "endless": lambda connection: connection.sendall(b"x" * 100_000),
    "nested": lambda connection: connection.sendall(b"[" * 60_000 + b"\n"),
}


@pytest.mark.parametrize("world_size", [2, 5])
def test_all_get_their_answer(world_size: int) -> None:
    answers = meet(
        endpoint(free_port()), [request(rank, world_size, host=f"h{rank % 2}") for rank in range(world_size)]
    )
    assert [answer.local_rank for answer in answers if isinstance(answer, JoinReply)] == [
        r // 2 for r in range(world_size)
    ]
    assert all(isinstance(answer, JoinReply) and answer.num_nodes == 2 for answer in answers)


def test_those_that_are_missing_are_named_to_all_that_came() -> None:
    errors = meet(endpoint(free_port()), [request(0, 4), request(2, 4)], timeout=2.0)
    for error in errors:
        if isinstance(error, JoinReply):
            assert error.late
            text = error.error
        else:
            assert isinstance(error, JoinTimeoutError)
            text = str(error)
        assert text.startswith("ranks 1, 3 of 4 did not arrive within 2 s; ranks 0, 2 did")


def test_a_rank_zero_that_never_comes_is_a_timeout() -> None:
    (error,) = meet(endpoint(free_port()), [request(1, 2)], timeout=0.3)
    assert isinstance(error, JoinTimeoutError)
    assert "rank zero was not found at 127.0.0.1" in str(error)
    assert "(from the test) within 0.3 s: Connection refused" in str(error)


@pytest.mark.parametrize(
    "requests", [[request(0, 3), request(1, 3), request(1, 3)], [request(0, 3), request(1, 3), request(2, 4)]]
)
def test_worlds_that_do_not_fit_are_told_to_all_that_came(requests: list[JoinRequest]) -> None:
    for answer in meet(endpoint(free_port()), requests, timeout=1.5):
        assert isinstance(answer, JoinError) or answer.error


def test_a_problem_of_one_rank_is_told_to_all() -> None:
    for answer in meet(endpoint(free_port()), [request(0, 2), request(1, 2, problem="no device")]):
        assert isinstance(answer, JoinReply)
        assert answer.error == "rank 1 on here: no device"


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_on_the_port_is_named(kind: str) -> None:
    with stranger(STRANGERS[kind]) as port:
        zero, one = meet(endpoint(port), [request(0, 2), request(1, 2)], timeout=0.5)
    assert "another program or job has the port; choose another MASTER_PORT" in str(zero)
    assert isinstance(one, JoinTimeoutError)
    assert f"the listener on port {port} is not rank zero of this world" in str(one)


def test_derived_ports_walk_past_a_stranger() -> None:
    with stranger(STRANGERS["closes"]) as taken:
        answers = meet(endpoint(taken, free_port()), [request(rank, 3) for rank in range(3)])
    assert all(isinstance(answer, JoinReply) and not answer.error for answer in answers)


def test_another_worlds_rank_zero_is_a_stranger() -> None:
    port = free_port()
    with ThreadPoolExecutor(max_workers=1) as pool:
        other = pool.submit(meet, endpoint(port, key="another"), [request(0, 2)], timeout=1.0)
        (one,) = meet(endpoint(port), [request(1, 2)], timeout=0.5)
        other.result()
    assert "is not rank zero of this world" in str(one)


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_rank_with_another_secret_does_not_wait(has_secret: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank zero waits on: a stranger could end the job else."""
    monkeypatch.setattr(rank_zero, "_OTHER_KEY_SECONDS", 0.1)
    port = free_port()
    with ThreadPoolExecutor(max_workers=1) as pool:
        zero = pool.submit(meet, endpoint(port, key="another"), [request(0, 2)], timeout=1.0)
        (one,) = meet(replace(endpoint(port), has_secret=has_secret), [request(1, 2)], timeout=100.0)
        (waited,) = zero.result()
    assert isinstance(one, JoinError)
    assert not isinstance(one, JoinTimeoutError)
    assert f"rank zero at 127.0.0.1:{port} (from the test) does not belong to the job of this rank" in str(one)
    assert "give all hosts the same RANKWISE_SECRET" in str(one)
    assert "rank 1 of 2 did not arrive" in str(waited)


def test_a_stranger_that_answers_wrongly_is_no_rank() -> None:
    """It proves nothing, and sends the request of a rank all the same."""
    port = free_port()
    own = replace(endpoint(port), has_secret=True)
    with ThreadPoolExecutor(max_workers=1) as pool:
        world = pool.submit(meet, own, [request(0, 2)], timeout=100.0)
        with visit(port) as connection, contextlib.suppress(ConnectionError):
            for message in ({"nonce": "0"}, {"answer": "0" * 64}):
                connection.sendall(json.dumps({"protocol": "rankwise/1", **message}).encode() + b"\n")
            connection.sendall(request(1, 2).encode().encode() + b"\n")
            while connection.recv(4096):
                pass
        answers = [*meet(own, [request(1, 2)]), *world.result()]
    assert all(isinstance(answer, JoinReply) and not answer.error for answer in answers), answers


def test_another_worlds_store_is_a_stranger_and_is_left_alone() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = store.num_keys()
    (one,) = meet(endpoint(store.port), [request(1, 2)], timeout=0.5)
    assert "is not rank zero of this world" in str(one)
    assert store.num_keys() == before


def test_strangers_at_rank_zeros_door_are_let_go() -> None:
    """Port scanners, health checks, and a rank that died while it waited and was started again."""
    port = free_port()
    with ThreadPoolExecutor(max_workers=1) as pool:
        world = pool.submit(meet, endpoint(port), [request(0, 3)], timeout=100.0)
        visits = [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1}\n', b"[]\n", b"\xff\n", b"x" * 70_000]
        visits.append(request(1, 3).encode().encode() + b"\n")
        visits.append(b"[" * 60_000 + b"\n")
        visits += [json.dumps(asdict(request(1, 3)) | odd).encode() + b"\n" for odd in ODD]
        for sent in visits:
            with visit(port) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
        answers = [*meet(endpoint(port), [request(1, 3), request(2, 3)]), *world.result()]
    assert all(isinstance(answer, JoinReply) and not answer.error for answer in answers)


def test_a_rank_of_another_job_is_refused_by_name_and_holds_nobody_up() -> None:
    port = free_port()
    with ThreadPoolExecutor(max_workers=1) as pool:
        world = pool.submit(meet, endpoint(port), [request(0, 2, job="slurm 17.0")], timeout=100.0)
        (error,) = meet(endpoint(port), [request(1, 2, job="slurm 18.0")])
        assert "rank 1 on here is in job 'slurm 18.0', but rank 0 on here is in job 'slurm 17.0'" in str(error)
        answers = [*meet(endpoint(port), [request(1, 2, job="slurm 17.0")]), *world.result()]
    assert all(isinstance(answer, JoinReply) and not answer.error for answer in answers), answers


def test_strangers_that_stay_and_say_nothing_hold_nobody_up() -> None:
    """Health checks, `nc`, a `TCPStore` client of another job: they are connected when the last rank comes."""
    port = free_port()
    with contextlib.ExitStack() as stay, ThreadPoolExecutor(max_workers=1) as pool:
        world = pool.submit(meet, endpoint(port), [request(0, 3)], timeout=100.0)
        for sent in (b"", b"\x03", b'{"protocol"', b'{"protocol": "rankwise/1", "nonce": "0"}\n'):
            stay.enter_context(visit(port)).sendall(sent)
        answers = [*meet(endpoint(port), [request(1, 3), request(2, 3)]), *world.result()]
    assert all(isinstance(answer, JoinReply) and not answer.error for answer in answers), answers


@pytest.mark.slow
def test_a_stranger_that_speaks_slowly_is_sent_away_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "IDENTIFY_SECONDS", 0.3)
    port = free_port()
    with ThreadPoolExecutor(max_workers=1) as pool:
        world = pool.submit(meet, endpoint(port), [request(0, 2)], timeout=4.0)
        with visit(port) as connection, contextlib.suppress(ConnectionError, TimeoutError):
            connection.settimeout(0.05)
            while not world.done():
                connection.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        break
            assert not world.done()
        (error,) = world.result()
    assert str(error).endswith(" 1 connection was closed that was no rank's, from 127.0.0.1."), error


def test_what_others_say_of_themselves_cannot_write_to_the_terminal() -> None:
    evil = request(1, 3, host="\x1b]0;pwned\x07here\x1b[2J", problem="no\x1b[31m device\u202e")
    for answer in meet(endpoint(free_port()), [request(0, 3), evil, request(2, 3)]):
        assert isinstance(answer, JoinReply)
        assert answer.error == r"rank 1 on \x1b]0;pwned\x07here\x1b[2J: no\x1b[31m device\u202e"


def test_problems_of_many_ranks_fit_into_an_answer() -> None:
    answers = meet(
        endpoint(free_port()), [request(0, 8), *(request(rank, 8, problem="é" * 9000) for rank in range(1, 8))]
    )
    assert all(isinstance(answer, JoinReply) and "rank 1 on here: é" in answer.error for answer in answers), answers


@pytest.mark.parametrize(
    "enough", [pytest.param(True, id="strangers"), pytest.param(False, id="ranks", marks=pytest.mark.slow)]
)
def test_a_rank_zero_without_descriptors(enough: bool) -> None:
    """It needs those that strangers hold; what the ranks themselves need it cannot do without."""
    port, size, spare = free_port(), 6, 8 if enough else 3
    with crowd(port, 24 if enough else 0):
        ended = run_ranks(
            "meet.py", [plain(rank, size, port) for rank in range(size)], str(spare), "20" if enough else "5"
        )
    said = [process.stdout for process in ended]
    if enough:
        assert said == ["met\n"] * size, ended
    else:
        assert said[0].startswith("JoinError: no more ranks can connect: Too many open files, with 3 of them"), ended
        assert all(text.startswith("JoinError: ") for text in said), ended


@contextmanager
def crowd(port: int, count: int) -> Iterator[None]:
    """Connect so often, from a process of its own, as soon as somebody listens."""
    with subprocess.Popen(
        [sys.executable, PROGRAMS / "crowd.py", str(port), str(count)], stdin=subprocess.PIPE
    ) as all_:
        try:
            yield
        finally:
            all_.kill()


def visit(port: int) -> socket.socket:
    """Connect as soon as somebody listens."""
    for _ in range(1000):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=100.0)
        except ConnectionRefusedError:
            time.sleep(0.005)
    raise TimeoutError


def test_the_addresses_of_a_host_are_tried_at_the_same_time() -> None:
    """Of an unknown name, addresses that never answer, and one of each kind of IP, one is sufficient."""
    others = ("192.0.2.1", "198.51.100.1", "::1", "127.0.0.1")
    where = replace(endpoint(*(free_port() for _ in range(8)), host="no-such-host.invalid"), other_hosts=others)
    zero, one = meet(where, [request(0, 2), request(1, 2)])
    assert isinstance(zero, JoinReply)
    assert isinstance(one, JoinReply)


def test_a_host_that_does_not_resolve_is_named() -> None:
    (error,) = meet(endpoint(1234, host="no-such-host.invalid"), [request(1, 2)], timeout=0.3)
    assert "host 'no-such-host.invalid'" in str(error)
    assert "cannot be resolved" in str(error)
