"""Where the ranks of a session are: on which host each, and in which unit. No I/O.

Each rank knows this of all ranks. So it is kept in arrays, with an entry for each range of ranks on one host: lists and
dictionaries of 16,384 ranks would take megabytes on each of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from rankwise.errors import printable, shortened

_MAX_HOST_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a session, in the order of their first ranks.

    Attributes:
        names: Their names.
        watched: For each of them "1" if its first rank has a watch, else "0".
        lengths: How many ranks follow each other on one host, in the order of ranks.
        numbers: The number of the host of each of these ranges.
    """

    names: tuple[str, ...]
    watched: str
    lengths: tuple[int, ...]
    numbers: tuple[int, ...]

    @classmethod
    def one(cls, size: int) -> Hosts:
        """Return the only host of so many ranks."""
        return cls(("",), "0", (size,), (0,))

    @classmethod
    def of(cls, reported: Sequence[str]) -> Hosts:
        """Return the hosts that ranks have reported: the id, whether the rank has a watch, and the name."""
        known: dict[str, int] = {}
        names, watched, lengths, numbers = list[str](), list[str](), list[int](), list[int]()
        for text in reported:
            host, mark, name = f"{text}  ".split(" ", 2)
            number = known.setdefault(host, len(known))
            if number == len(names):
                names.append(printable(shortened(name.strip(), _MAX_HOST_NAME)))
                watched.append("1" if mark == "1" else "0")
            if numbers and numbers[-1] == number:
                lengths[-1] += 1
            else:
                lengths.append(1)
                numbers.append(number)
        return cls(tuple(names), "".join(watched), tuple(lengths), tuple(numbers))

    def are_of(self, size: int) -> bool:
        """Return whether these are the hosts of so many ranks."""
        return (
            sum(self.lengths) == size
            and min(self.lengths) > 0
            and len(self.numbers) == len(self.lengths)
            and list(dict.fromkeys(self.numbers)) == list(range(len(self.names)))
            and len(self.watched) == len(self.names)
        )


class Places:
    """The hosts of the ranks of a session.

    Attributes:
        ranks: The global ranks, in ascending order.
        num_hosts: The number of hosts.
    """

    def __init__(self, ranks: Sequence[int], hosts: Hosts) -> None:
        self.ranks = ranks
        self.num_hosts = len(hosts.names)
        self._ends = array("I", accumulate(hosts.lengths))
        self._numbers = array("I", hosts.numbers)
        self._names = "".join(hosts.names)
        self._name_ends = array("I", accumulate(map(len, hosts.names), initial=0))

    def host(self, rank: int) -> int:
        """Return the number of the host of a rank."""
        return self._numbers[bisect_right(self._ends, bisect_left(self.ranks, rank))]

    def host_name(self, rank: int) -> str:
        """Return the name of the host of a rank; "" if there is one host."""
        number = self.host(rank)
        return self._names[self._name_ends[number] : self._name_ends[number + 1]]

    def by_host(self) -> list[list[int]]:
        """Return the ranks of each host."""
        found: list[list[int]] = [[] for _ in range(self.num_hosts)]
        for start, end, number in zip([0, *self._ends], self._ends, self._numbers, strict=False):
            found[number] += self.ranks[start:end]
        return found


class Units:
    """The units of a session, in the order of their first ranks, which lead them.

    The ranks of a host that share a page are a unit, and each other rank is one.
    """

    def __init__(self, places: Places, has_page: Sequence[bool]) -> None:
        """Find them; `has_page` has for each host whether its ranks share a page."""
        by_host = places.by_host()
        leaders = [there[:1] if is_shared else there for there, is_shared in zip(by_host, has_page, strict=True)]
        self.places = places
        self._leaders = array("I", sorted(rank for each in leaders for rank in each))
        # The unit of the ranks of each host that share a page; -1 for the other hosts.
        shared = (
            self._led_by(there[0]) if is_shared else -1 for there, is_shared in zip(by_host, has_page, strict=True)
        )
        self._of_host = array("i", shared)

    def __len__(self) -> int:
        return len(self._leaders)

    def of(self, rank: int) -> int:
        """Return the number of the unit of a rank."""
        unit = self._of_host[self.places.host(rank)]
        return self._led_by(rank) if unit < 0 else unit

    def leader(self, number: int) -> int:
        """Return the first rank of a unit."""
        return self._leaders[number]

    def _led_by(self, rank: int) -> int:
        return bisect_left(self._leaders, rank)
