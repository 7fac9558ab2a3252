"""A real sshd on each of two hosts that are network namespaces, and a client that knows them by aliases alone.

`gpu-a` is the first host, `gpu-b` and `gpu-c` are the second one, and `gpu-x` is none. These names are in the
configuration of ssh and nowhere else. `no-rankwise`, `no-python` and `no-folder` are the second host too, but an sshd
of it that does not see these files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rankwise as rw
from tests.clusters.hosts import BIN, HERE, on_two_hosts
from tests.clusters.packages import which, why_not

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "pgrep": "procps"}
SECOND = "10.9.9.2"
ALIASES = {"gpu-a": "10.9.9.1", "gpu-b": SECOND, "gpu-c": SECOND, "gpu-x": "10.9.9.9"}
LAUNCH = f"{BIN / 'rankwise'} launch -n 2 --ssh"
STEPS = str(HERE / "programs" / "steps.py")
INTERRUPTED = str(HERE / "programs" / "interrupted.py")
SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
UseDNS no
"""
CLIENT = """\
StrictHostKeyChecking yes
UserKnownHostsFile {folder}/known_hosts
IdentityFile {folder}/key
IdentitiesOnly yes
"""
# What an sshd of the second host does not see, by its port.
HIDDEN = {
    "no-rankwise": (2201, str(Path(rw.__file__).parents[1])),
    "no-python": (2202, str(Path(sys.executable).parent)),
    "no-folder": (2203, "$TMPDIR/work"),
}
SHELL = """
sshd() {
    unshare --mount sh -c "$1; exec $SSHD -D -e -f $TMPDIR/sshd_config -p $2" 2>>"$TMPDIR/sshd.log" &
    servers="$servers $!"
}
mkdir -p /run/sshd "$TMPDIR/work"
sshd : 22
if [ $HOST = 1 ]; then
    HIDE
    until [ -e "$TMPDIR/over" ]; do sleep 0.1; done
    kill $servers
    exit
fi
for host in gpu-a gpu-b; do until $RANKWISE_SSH $host true 2>/dev/null; do sleep 0.1; done; done
COMMANDS
# Until none of the processes of a launch is left on either host; else their commands are printed.
for _ in $(seq 300); do
    left=$(pgrep -af 'rankwise._launch|steps.py' | grep -v 'TMPDIR/over')
    [ -z "$left" ] && break
    sleep 0.1
done
echo "left: $left"
: > "$TMPDIR/over"
kill $servers
"""


def over_ssh(folder: Path, commands: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run lines of shell on the first host, once both have an sshd, and wait until no process of a launch is left."""
    reason = why_not(PACKAGES)
    if reason:
        pytest.skip(f"no sshd: {reason}")
    for name in ("key", "host_key", "other_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=200)
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    hosts = [f"Host {name}\n    HostName {address}\n" for name, address in ALIASES.items()]
    hosts += [f"Host {name}\n    HostName {SECOND}\n    Port {port}\n" for name, (port, _) in HIDDEN.items()]
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder) + "".join(hosts))
    for file, key in (("known_hosts", "host_key.pub"), ("other_hosts", "other_key.pub")):
        names = [*ALIASES.values(), *(f"[{SECOND}]:{port}" for port, _ in HIDDEN.values())]
        (folder / file).write_text("".join(f"{name} {(folder / key).read_text()}" for name in names))
    hide = "\n".join(f'sshd "mount -t tmpfs none {files}" {port}' for port, files in HIDDEN.values())
    shell = SHELL.replace("HIDE", hide).replace("COMMANDS", commands)
    ssh = {"SSHD": which("sshd") or "sshd", "RANKWISE_SSH": f"ssh -F {folder}/ssh_config"}
    return on_two_hosts(folder, shell, *args, **ssh | variables)


def output_of(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that the shell has printed, after a check that nothing is left."""
    *lines, left = ended.stdout.splitlines() or [""]
    assert left == "left: ", f"{left}\n{ended.stderr}"
    return lines
