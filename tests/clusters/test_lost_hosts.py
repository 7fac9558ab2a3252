"""A host that is cut off, loses its power, or loses all of its processes, while the ranks of two hosts reduce."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from tests.clusters.hosts import BIN, HERE, needs_namespaces, on_two_hosts
from tests.lanes import SEED, variants

pytestmark = [needs_namespaces, pytest.mark.slow]

STEPS = str(HERE / "programs" / "steps.py")
TIMEOUT = 3
# Bounds on hangs: the timeout of the ranks, 5 s, and a loaded machine.
SLOW = 40
LAUNCH = f"{BIN / 'rankwise'} launch -n 2 --no-prefix "
STATIC = "--nnodes 2 --node-rank $HOST --master-addr left"
ELASTIC = "--nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint left:29400 --rdzv-conf last_call_timeout=1"
# Waits until so many ranks have reduced after a file was made: the first attempt may be without a host that is late.
REDUCED = 'until find "$2" -name "{ranks}-*-{last}" -newer "$2/{since}" | grep -q .; do sleep 0.1; done; '
# On the host that is lost: what is done to it once all ranks have reduced, then the time.
WAIT = REDUCED.format(ranks=4, last=0, since="hosts") + REDUCED.format(ranks=4, last=3, since="hosts")
CABLE = 'ip link set right0 down; date +%s > "$2/lost"; '
CUT = WAIT + CABLE + "wait $launcher; "
# No last packet leaves the host: its processes are killed when nothing can be sent any more.
POWER_OFF = CABLE + (
    "own=$(readlink /proc/self/ns/net); for each in /proc/[0-9]*; do "
    'if [ "${each#/proc/}" != $$ ] && [ "$(readlink $each/ns/net)" = "$own" ]; then kill -9 ${each#/proc/}; fi; done; '
)
KILL = WAIT + 'date +%s > "$2/lost"; kill -9 $launcher; '


def lose(
    folder: Path, options: str, how: str, number: int = 1, *, after: str = ""
) -> tuple[float, dict[str, str], str]:
    """Launch on two hosts, lose one of them; return the seconds until the end, exit statuses, and messages."""
    shell = f'{LAUNCH} {options} "$1" {TIMEOUT} "$2" & launcher=$!; '
    shell += f'if [ $HOST = {number} ]; then {how} fi; {after} wait $launcher; echo "$HOST: $?" >> "$2/ended"'
    ended = on_two_hosts(folder, shell, STEPS, str(folder))
    statuses = dict(line.split(": ") for line in (folder / "ended").read_text().splitlines())
    return time.time() - float((folder / "lost").read_text()), statuses, ended.stderr


def test_a_host_that_is_cut_off_ends_both_sides(tmp_path: Path) -> None:
    seconds, statuses, messages = lose(tmp_path, STATIC, CUT)
    assert "0" not in statuses.values()
    assert seconds < TIMEOUT + SLOW
    for number, name in ((1, "right"), (0, "left")):
        assert re.search(rf"host {number} \({name}\) is lost: nothing was heard of it for \d s", messages), messages


@pytest.mark.parametrize(("number", "name"), variants([(0, "left"), (1, "right")], slow=[(0, "left")]))
def test_a_host_whose_launcher_is_killed_ends_the_other(tmp_path: Path, number: int, name: str) -> None:
    """That of the first host takes the store with it."""
    seconds, statuses, messages = lose(tmp_path, STATIC, KILL, number)
    assert statuses[str(1 - number)] == "1"
    assert seconds < SLOW
    assert f"host {number} ({name}) has ended: its connection was closed" in messages, messages


@pytest.mark.soak(20)
def test_the_host_that_is_left_goes_on(seed: int, tmp_path: Path) -> None:
    """The other loses its power, or is cut off, at any moment of a step. In the next attempt two ranks are alone."""
    draw = random.Random(seed)  # noqa: S311 - to be repeated
    has_power = draw.random() < 0.5 and seed != SEED
    how = WAIT + f"sleep {draw.uniform(0, 0.5):.3f}; " + (CABLE + "wait $launcher; " if has_power else POWER_OFF)
    after = 'if [ $HOST = 0 ]; then until [ -e "$2/lost" ]; do sleep 0.1; done; '
    after += REDUCED.format(ranks=2, last=1, since="lost") + ': > "$2/enough"; fi; '
    _, statuses, messages = lose(tmp_path, ELASTIC, how, after=after)
    assert statuses == {"0": "0", "1": "1" if has_power else "137"}, messages
    said = r"host 1 \(right\) is lost: nothing was heard of it for \d s; the ranks restart on the other hosts"
    assert re.search(said, messages), messages


@pytest.mark.rare
@pytest.mark.soak(20)
def test_a_cut_at_any_moment_ends_both_sides(seed: int, tmp_path: Path) -> None:
    """Also while the launchers meet, or the ranks join."""
    seconds = random.Random(seed).uniform(0, 8)  # noqa: S311 - likewise
    options = f"{STATIC} --rdzv-conf timeout=10"
    _, statuses, messages = lose(tmp_path, options, f"sleep {seconds:.3f}; {CABLE} wait $launcher; ")
    assert sorted(statuses) == ["0", "1"]
    assert "0" not in statuses.values(), messages
    assert messages.count("rankwise: ") >= 2, messages


@pytest.mark.rare
def test_a_host_that_comes_back_takes_part_again(tmp_path: Path) -> None:
    back = CUT + "ip link set right0 up; " + REDUCED.format(ranks=2, last=1, since="lost") + ': > "$2/back"; '
    back += f'{LAUNCH} {ELASTIC} "$1" {TIMEOUT} "$2" & launcher=$!; '
    after = 'if [ $HOST = 0 ]; then until [ -e "$2/back" ]; do sleep 0.1; done; '
    after += REDUCED.format(ranks=4, last=3, since="back") + ': > "$2/enough"; fi; '
    _, statuses, messages = lose(tmp_path, ELASTIC, back, after=after)
    assert statuses == {"0": "0", "1": "0"}, messages
