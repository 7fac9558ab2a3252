"""The secret of a job: where it is found, what is refused, and that it is never shown."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore

import rankwise as rw
from rankwise._launch.forkserver.ipc import StartRequest, Target, TargetKind
from rankwise._net.acceptor import Client
from rankwise._net.job_secret import DEFAULT_FILE, JobSecret, code, find_secret
from rankwise._net.rank_proof import AcceptedProofs, Sender, connection_key, prove
from rankwise._rendezvous.signed_store import SignedStore, part_of
from rankwise.cli.env_report import _variables
from tests.session.worlds import clean_environ

TEXT = "0123456789abcdef0123456789abcdef"


def written(folder: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path = folder / DEFAULT_FILE
    path.parent.mkdir()
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def test_a_secret_is_found_in_the_variable_or_else_in_the_file(tmp_path: Path) -> None:
    assert find_secret({"HOME": str(tmp_path)}) is None
    path = written(tmp_path)
    in_file = find_secret({"HOME": str(tmp_path)})
    in_variable = find_secret({"HOME": str(tmp_path), "RANKWISE_SECRET": TEXT[::-1]})
    named = find_secret({"RANKWISE_SECRET_FILE": str(path)})
    assert in_file is not None
    assert in_variable is not None
    assert named is not None
    assert (in_file.source, in_variable.source) == (str(path), "RANKWISE_SECRET")
    assert in_file.code("a", b"b") == named.code("a", b"b") != in_variable.code("a", b"b")
    assert TEXT not in repr(in_file)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, mode=mode)
    with pytest.raises(rw.LauncherEnvironmentError, match=f"is not private.*mode {mode:o}.*chmod 600 {path}") as raised:
        find_secret({"HOME": str(tmp_path)})
    assert TEXT not in str(raised.value)


def test_a_short_secret_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(rw.LauncherEnvironmentError, match="RANKWISE_SECRET has 6 characters") as raised:
        find_secret({"RANKWISE_SECRET": "qwertz"})
    assert "qwertz" not in str(raised.value)
    with pytest.raises(rw.LauncherEnvironmentError, match="cannot be read: No such file"):
        find_secret({"RANKWISE_SECRET_FILE": str(tmp_path / "none")})


def test_codes_differ_where_parts_are_divided_otherwise() -> None:
    assert len({code(b"k", "p", b"ab", b"c"), code(b"k", "p", b"a", b"bc"), code(b"k", "pa", b"b", b"c")}) == 3


def test_entries_of_a_store_without_the_secret_are_refused() -> None:
    below = HashStore()
    store = part_of(SignedStore(below, JobSecret(TEXT, "a test")), "part")
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.compare_set("other", "", "first") == store.compare_set("other", "", "second") == b"first"
    assert store.compare_set("other", "first", "third") == b"third"
    assert store.add("number", 2) == 2
    below.set("part/moved", below.get("part/key").decode("latin1"))
    below.set("part/forged", "value")
    for key in ("moved", "forged"):
        with pytest.raises(rw.JoinError, match=f"entry '{key}' of the store .* is not signed") as raised:
            store.get(key)
        assert TEXT not in str(raised.value)
    assert store.delete_key("key")
    assert not store.check(["key"])


@pytest.mark.parametrize("same", [True, False])
def test_ranks_prove_to_each_other_that_they_know_the_key(same: bool) -> None:
    secrets = [JobSecret(TEXT, "a test"), JobSecret(TEXT if same else TEXT[::-1], "a test")]
    ours, theirs = (connection_key(secret, b"published") for secret in secrets)
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(20)
        client, proofs, sent = Client(near, 0.0, "here"), AcceptedProofs(ours), list[bool]()
        thread = threading.Thread(target=lambda: sent.append(prove(far, theirs, 3)))
        thread.start()
        assert proofs.sender(client) is None  # its answer is sent
        if same:
            assert proofs.sender(client) == Sender(3, 0)
        thread.join(20)
        assert sent == [same]


def test_a_proof_with_another_key_is_refused() -> None:
    near, far = socket.socketpair()
    with near, far:
        client, proofs = Client(near, 0.0, "here"), AcceptedProofs(b"key")
        far.sendall(bytes(28) + bytes(32))
        assert proofs.sender(client) == Sender(-1, 0)


WAITS = """
import rankwise as rw
with rw.init(device="cpu"):
    rw.report_progress(1)
    if rw.get_rank() == 1:
        open("up", "w").close()
        while True:
            pass
    rw.barrier()
"""


@pytest.mark.slow
def test_no_command_shows_a_secret(tmp_path: Path) -> None:
    """Not in its output, nor in the title of a process, nor in a file of a launch that fails."""
    (tmp_path / "waits.py").write_text(WAITS)
    environ = clean_environ(RANKWISE_SECRET=TEXT, TMPDIR=str(tmp_path))
    rankwise = str(Path(sys.executable).with_name("rankwise"))

    def output(*words: str) -> str:
        command = [rankwise, *words]
        ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        return ended.stdout + ended.stderr

    launch = [rankwise, "launch", "-n", "2", "--hang-dir", "hangs", "--log-dir", "logs", "waits.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(launch, cwd=tmp_path, env=environ, stdout=pipe, stderr=subprocess.STDOUT) as started:
        launcher = psutil.Process(started.pid)
        while not (tmp_path / "up").exists():
            assert started.poll() is None
        processes = [launcher, *launcher.children(recursive=True)]
        shown = [repr(process.cmdline()) + process.name() for process in processes]
        pid = str(started.pid)
        shown += [output("ps"), output("stacks", pid), output("stacks", pid, "--watch", "2")]
        processes[-1].kill()
        shown.append(started.communicate(timeout=200)[0].decode())
    files = [path for folder in ("hangs", "logs") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    shown += [path.read_text() for path in files]
    env = [output("env"), output("env", "--json"), output("env", "--all"), output("env", "--all", "--json")]
    assert all("set (32 characters)" in text for text in env)
    shown += [*env, output("env", "--why"), output("submit", "waits.py", "--k8s", "--dry-run", "--image", "an-image")]
    shown += [repr(StartRequest(environ={"RANKWISE_SECRET": TEXT}, target=Target(kind=TargetKind.SCRIPT)))]
    assert not any(TEXT in text for text in shown)


def test_all_shows_that_two_ranks_have_different_secrets() -> None:
    ours, theirs = ({"variables": _variables({"RANKWISE_SECRET": text}, [])} for text in (TEXT, TEXT[::-1]))
    assert ours != theirs
    assert ours == {"variables": _variables({"RANKWISE_SECRET": TEXT}, [])}
