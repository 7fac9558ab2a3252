"""A launcher beyond the number of hosts, with torch's c10d rendezvous: it waits, and takes the place of a lost host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.hosts import BIN, HERE, needs_namespaces, on_two_hosts

pytestmark = [needs_namespaces, pytest.mark.slow]

STEPS = str(HERE / "programs" / "steps.py")
LAUNCH = f"{BIN / 'rankwise'} launch -n 2 --no-prefix --nnodes 2:2 --max-restarts 3 --rdzv-backend c10d "
LAUNCH += '--rdzv-endpoint left:29400 --rdzv-conf last_call_timeout=1,keep_alive_interval=1 "$1" 100 "$2"'
# On the second host, when all ranks run: a third launcher; when it waits, the second one is killed.
REPLACED = 'until [ -e "$2/4-0-0" ] && [ -e "$2/4-0-3" ]; do sleep 0.1; done; '
REPLACED += f'{LAUNCH} 2> "$2/spare" & spare=$!; '
REPLACED += 'until grep -q "waits as a spare" "$2/spare"; do sleep 0.1; done; kill -9 $launcher; '
REPLACED += (
    'until [ -e "$2/4-1-3" ]; do sleep 0.1; done; : > "$2/enough"; wait $spare; echo "spare: $?" >> "$2/ended"; '
)


def test_a_spare_takes_the_place_of_a_lost_host(tmp_path: Path) -> None:
    shell = f"{LAUNCH} & launcher=$!; if [ $HOST = 1 ]; then {REPLACED} fi; "
    ended = on_two_hosts(tmp_path, f'{shell} wait $launcher; echo "$HOST: $?" >> "$2/ended"', STEPS, str(tmp_path))
    assert set((tmp_path / "ended").read_text().splitlines()) == {"spare: 0", "0: 0", "1: 137"}, ended.stderr
    told = next(line for line in (tmp_path / "spare").read_text().splitlines() if "spare" in line)
    assert told.startswith("rankwise: 2 of 2 hosts have joined: ")
    assert "the ranks restart on the other hosts" in ended.stderr
