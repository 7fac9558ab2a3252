"""Slurm host lists: `node[08-11,15],login1` and the like, expanded as `scontrol show hostnames` does.

Also taken, as Slurm 24.11 does and 22.05 does not: text after a bracket (`cn[1-2]-ib0`). No program is started.
"""

from __future__ import annotations

import re

from rankwise.errors import LauncherEnvironmentError

# Slurm's own limit (MAX_RANGE in its hostlist.c): a longer range is a typing error.
MAX_HOSTS = 65536
# No name that a resolver takes is longer.
_LONGEST_NAME = 255
_MOST_DIGITS = 18
# How many characters of a list an error message shows.
_SHOWN = 200


def expand(hostlist: str) -> list[str]:
    """Return the host names in a Slurm host list, in its order, duplicates kept, zero padding kept.

    Raises:
        LauncherEnvironmentError: It is malformed, or longer than 65,536 hosts.

    Example:
        >>> expand("node[08-10],login1")
        ['node08', 'node09', 'node10', 'login1']
    """
    hosts: list[str] = []
    for name in _split(hostlist):
        hosts += _expand_name(name, hostlist)
        if len(hosts) > MAX_HOSTS:
            raise _malformed(hostlist, f"more than {MAX_HOSTS} hosts")
    return hosts


def _split(hostlist: str) -> list[str]:
    """Split at commas and blanks outside of brackets: "a[1,2],b c" -> ["a[1,2]", "b", "c"]."""
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", hostlist):
        raise _malformed(hostlist, "its brackets do not match")
    return re.findall(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", hostlist)


def _expand_name(name: str, hostlist: str) -> list[str]:
    """Expand one name: "r[1-2]c[1-2]" -> ["r1c1", "r1c2", "r2c1", "r2c2"]."""
    # Text at even places, the insides of brackets at odd ones.
    parts = re.split(r"\[([^\[\]]*)\]", name)
    brackets = [_expand_ranges(inside, hostlist) for inside in parts[1::2]]
    count = 1
    for values in brackets:
        count *= len(values)
        if count > MAX_HOSTS:
            raise _malformed(hostlist, f"more than {MAX_HOSTS} hosts")
    if sum(map(len, parts[::2])) + sum(max(map(len, values)) for values in brackets) > _LONGEST_NAME:
        raise _malformed(hostlist, f"a name of more than {_LONGEST_NAME} characters")

    if not brackets:
        return [name]
    # The last bracket varies fastest, but those before it vary the first one fastest: so does scontrol.
    prefixes = [parts[0]]
    for text, values in zip(parts[2:-1:2], brackets[:-1], strict=True):
        prefixes = [prefix + value + text for value in values for prefix in prefixes]
    return [prefix + value + parts[-1] for prefix in prefixes for value in brackets[-1]]


def _expand_ranges(inside: str, hostlist: str) -> list[str]:
    """Expand the inside of a bracket: "08-10,15" -> ["08", "09", "10", "15"]."""
    values: list[str] = []
    for item in inside.split(","):
        match = re.fullmatch(rf"([0-9]{{1,{_MOST_DIGITS}}})(?:-([0-9]{{0,{_MOST_DIGITS}}}))?", item)
        if match is None:
            raise _malformed(hostlist, f"{item[:_SHOWN]!r} is not a number or a range")
        first = match[1]
        last = match[2] or first  # "1-" is 1 to scontrol
        if int(last) < int(first):
            raise _malformed(hostlist, f"{item!r} runs backwards")
        if int(last) - int(first) >= MAX_HOSTS:
            raise _malformed(hostlist, f"{item!r} has more than {MAX_HOSTS} hosts")
        if len(values) > MAX_HOSTS:
            raise _malformed(hostlist, f"more than {MAX_HOSTS} hosts")
        values += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return values


def _malformed(hostlist: str, why: str) -> LauncherEnvironmentError:
    shown = hostlist if len(hostlist) <= _SHOWN else f"{hostlist[:_SHOWN]}..."
    return LauncherEnvironmentError(f"{shown!r} is not a Slurm host list: {why}")
