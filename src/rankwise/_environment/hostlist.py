"""Slurm host lists: `node[08-11,15],login1` and the like, expanded as `scontrol show hostnames` does.

Also taken, as Slurm 24.11 does and 22.05 does not: text after a bracket (`cn[1-2]-ib0`). No program is started.
"""

from __future__ import annotations

import re

from rankwise.errors import LauncherEnvironmentError

# Slurm's own limit for one range (MAX_RANGE in its hostlist.c): a longer one is a typing error.
MAX_RANGE = 65536
# The most hosts of a list: several times those of the largest clusters.
MAX_HOSTS = 1 << 17
# No name that a resolver takes is longer.
_LONGEST_NAME = 255
_MOST_DIGITS = 18
_RANGE = re.compile(rf"([0-9]{{1,{_MOST_DIGITS}}})(?:-([0-9]{{0,{_MOST_DIGITS}}}))?")
# How many characters of a list an error message shows.
_SHOWN = 200


def expand(hostlist: str) -> list[str]:
    """Return the host names in a Slurm host list, in its order, duplicates kept, zero padding kept.

    Raises:
        LauncherEnvironmentError: It is malformed, has more than 131,072 hosts, or a range of more than 65,536.

    Example:
        >>> expand("node[08-10],login1")
        ['node08', 'node09', 'node10', 'login1']
    """
    hosts: list[str] = []
    for name in _split(hostlist):
        if "[" in name or len(name) > _LONGEST_NAME:
            hosts += _expand_name(name, hostlist)
        else:
            hosts.append(name)
        if len(hosts) > MAX_HOSTS:
            raise _malformed(hostlist, f"more than {MAX_HOSTS} hosts")
    return hosts


def first(hostlist: str) -> str | None:
    """Return the first host of a Slurm host list; None if it is empty. Reads no further, however long the list is.

    Raises:
        LauncherEnvironmentError: Its first name is malformed.

    Example:
        >>> first("node[08-10],login1")
        'node08'
    """
    name, position = "", re.match(r"[,\s]*", hostlist).end()  # type: ignore[union-attr]  # it matches any text
    while (found := re.compile(r"[\[\],\s]|\Z").search(hostlist, position)) is not None:
        name += hostlist[position : found.start()]
        if len(name) > _LONGEST_NAME:
            raise _malformed(hostlist, f"a name of more than {_LONGEST_NAME} characters")
        end = hostlist.find("]", found.start())
        if found[0] == "]" or (found[0] == "[" and end < 0):
            raise _malformed(hostlist, "its brackets do not match")
        if found[0] != "[":
            break
        comma = hostlist.find(",", found.end(), end)
        name += _range(hostlist[found.end() : end if comma < 0 else comma], hostlist)[0]
        position = end + 1
    return name or None


def _split(hostlist: str) -> list[str]:
    """Split at commas and blanks outside of brackets: "a[1,2],b c" -> ["a[1,2]", "b", "c"]."""
    if "[" not in hostlist and "]" not in hostlist:
        return hostlist.replace(",", " ").split()
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
        if len(values) > MAX_HOSTS:
            raise _malformed(hostlist, f"more than {MAX_HOSTS} hosts")
        if item.isascii() and item.isdecimal() and len(item) <= _MOST_DIGITS:  # the usual case, which is cheap
            values.append(item)
        else:
            lowest, last = _range(item, hostlist)
            values += [str(number).zfill(len(lowest)) for number in range(int(lowest), last + 1)]
    return values


def _range(item: str, hostlist: str) -> tuple[str, int]:
    """Return the first number of a range as it is written, and the last one: "08-10" -> ("08", 10), "15" -> ("15", 15).

    "1-" is 1 to scontrol.
    """
    match = _RANGE.fullmatch(item)
    if match is None:
        raise _malformed(hostlist, f"{item[:_SHOWN]!r} is not a number or a range")
    lowest, last = match[1], int(match[2] or match[1])
    if last < int(lowest):
        raise _malformed(hostlist, f"{item!r} runs backwards")
    if last - int(lowest) >= MAX_RANGE:
        raise _malformed(hostlist, f"{item!r} has more than {MAX_RANGE} hosts")
    return lowest, last


def _malformed(hostlist: str, why: str) -> LauncherEnvironmentError:
    shown = hostlist if len(hostlist) <= _SHOWN else f"{hostlist[:_SHOWN]}..."
    return LauncherEnvironmentError(f"{shown!r} is not a Slurm host list: {why}")
