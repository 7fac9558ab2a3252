"""The layout of the file in memory that the ranks of a host share: every offset and length. No I/O.

The file is a hole at first, and only the parts that were written take memory. So each part has room for its largest
size, and nothing is ever moved::

    0               directory   word 0: the number of entries, in use or free again
    2^20              entries   of the groups, GROUP_WORDS words each: the id plus one, or FREE; how many have left it
    DIRECTORY_BYTES windows     one for each group, of `window_bytes`:
                        word 0    not 0 after any member has failed, timed out or left
                        word 1    not 0 after any frame went to a ring
                        rows      from FIRST_WORD on, with a word for each slot: see `Row`
                        slots     one for each member, and one for the verdict:
                                    the frame of exchanges with an even number, FRAME_BYTES
                                    the frame of exchanges with an odd number, FRAME_BYTES
                                    why the member has left, REASON_BYTES
                        arrivals  a word for each of the last ARRIVALS exchanges, for each member: when it came
                                  to it, a float of seconds on the monotonic clock of the host
    2^42            staging     memory of each group through which tensors pass, MAX_STAGING_BYTES:
                        rows      one for each member: see `Staging`
                        pipes     from PIPES_START on, one for each ordered pair of members, `pipe_bytes` each: two
                                  counts, each in a cache line of its own, and a ring buffer: see `PipeEnd`
    2^52            bodies      of frames that do not fit into a slot, two for each slot of each window, BODY_BYTES
    2^59            rings       RING_ENTRIES entries for each slot of each window, ENTRY_BYTES each: a frame that has no
                                room in its slot, because other members have not read those before; and from
                                TEXT_OFFSET on, the error message of a member that has timed out in the exchange
    2^60            end

Words have 8 bytes, and are read and written at once, by one instruction each.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from typing import Final

# The largest number of ranks on a host: two descriptors for each are sent in one message, which carries at most 253.
MAX_RANKS: Final = 126

COUNT_WORD: Final = 0
GROUPS_OFFSET: Final = 1 << 20
GROUP_WORDS: Final = 2
FREE: Final = 0
MAX_GROUPS: Final = 1 << 16
DIRECTORY_BYTES: Final = GROUPS_OFFSET + 8 * GROUP_WORDS * MAX_GROUPS

ANY_PROBLEM: Final = 0
ANY_RING: Final = 1
FIRST_WORD: Final = 8
FRAME_BYTES: Final = 8192
REASON_BYTES: Final = 4096
SLOT_BYTES: Final = 2 * FRAME_BYTES + REASON_BYTES
ARRIVALS: Final = 1 << 10

MAX_STAGING_BYTES: Final = 1 << 27
PIPES_START: Final = (1 << 26) + (1 << 16)
PIPE_HEADER_BYTES: Final = 128
# The words of a pipe: how many bytes were written to it, and how many of them were read.
PIPE_WORDS: Final = 0, 8
_MAX_PIPE_BYTES: Final = 1 << 21
BODY_BYTES: Final = 1 << 34
ENTRY_BYTES: Final = 1 << 25
TEXT_OFFSET: Final = ENTRY_BYTES // 2
# The number of exchanges that a member can be ahead of another one.
RING_ENTRIES: Final = 1 << 10
FILE_BYTES: Final = 1 << 60

_STAGING_OFFSET: Final = 1 << 42
_BODIES_OFFSET: Final = 1 << 52
_RINGS_OFFSET: Final = 1 << 59


class Row(IntEnum):
    """The rows of words of a window; each has a word for each slot."""

    EVEN = 0  # the last exchange with an even number that has a frame in the slot
    ODD = 1  # the last one with an odd number
    RING = 2  # the last exchange with a frame in the ring
    PROBLEM = 3  # the last one that the member has failed in or timed out in
    FINISHED = 4  # the last one that the member has finished: it reads nothing of it any more
    LEFT = 5  # whether the member has left
    LARGE = 6  # whether any body did not fit into the slot
    SLEEPING = 7  # whether the member sleeps until it is woken, or is about to
    MET = 8  # the last meeting that the member has come to; for the verdict's slot, that all have come to
    UNVERIFIED = 9  # the number of calls of the member that were not verified


def words_bytes(num_members: int) -> int:
    """Return the length of the words of a window."""
    return _round_up(8 * (FIRST_WORD + len(Row) * (num_members + 1)))


def window_bytes(num_members: int) -> int:
    """Return the length of the window of a group."""
    return arrivals_start(num_members) + _round_up(8 * ARRIVALS * num_members)


def arrivals_start(num_members: int) -> int:
    """Return where the arrivals begin in the window of a group."""
    return words_bytes(num_members) + _round_up((num_members + 1) * SLOT_BYTES)


def place_of_arrivals(num_ranks: int) -> dict[str, int]:
    """Return where other processes find when the ranks of a host, all in one group, came to their last exchanges."""
    return {
        "directory": GROUPS_OFFSET,
        "entry": 8 * GROUP_WORDS,
        "windows": DIRECTORY_BYTES,
        "window": window_bytes(num_ranks),
        "last": 8 * FIRST_WORD,
        "arrivals": arrivals_start(num_ranks),
        "kept": ARRIVALS,
    }


def entry_word(window: int) -> int:
    """Return the index of the first word of the entry of a group in the directory."""
    return GROUPS_OFFSET // 8 + GROUP_WORDS * window


def staging_offset(window: int) -> int:
    """Return the offset of the memory of a group through which tensors pass."""
    return _STAGING_OFFSET + window * MAX_STAGING_BYTES


def pipe_bytes(num_members: int) -> int:
    """Return the length of a pipe of a group."""
    largest = min(_MAX_PIPE_BYTES, (MAX_STAGING_BYTES - PIPES_START) // num_members**2)
    return largest // PIPE_HEADER_BYTES * PIPE_HEADER_BYTES


def pipe_start(num_members: int, src: int, dst: int) -> int:
    """Return where the pipe from one member to another begins, behind PIPES_START."""
    return (src * num_members + dst) * pipe_bytes(num_members)


def body_offset(window: int, slot: int, parity: int) -> int:
    """Return the offset of the bodies of the exchanges of a parity that do not fit into a slot."""
    return _BODIES_OFFSET + (_slot_number(window, slot) * 2 + parity) * BODY_BYTES


def ring_entry_offset(window: int, slot: int, sequence: int) -> int:
    """Return the offset of the entry of an exchange in the ring of a slot."""
    return _RINGS_OFFSET + (_slot_number(window, slot) * RING_ENTRIES + sequence % RING_ENTRIES) * ENTRY_BYTES


def _slot_number(window: int, slot: int) -> int:
    return window * (MAX_RANKS + 1) + slot


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
