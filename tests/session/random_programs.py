"""Random programs of collectives, which ranks run: drawn here, as data, and run by `programs/random_program.py`.

A program is a dict: "size", the number of ranks; "steps", the same on all ranks; "seed", of the choices that each rank
makes alone; and "end", None or [step, rank, way], where a rank stops taking part. A step is a list:

    ["group", ranks]                              make a group; the first one, 0, has all ranks
    ["close", group]                              close it, on each member by itself
    ["call", group, kind, bytes, async_op, fault] a collective; the fault is None or [rank, way]
    ["pair", group, source, destination, bytes]   a value from one group rank to another
    ["wait"]                                      wait for some of the non-blocking calls that are pending
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

KINDS = (
    "all_reduce number",
    "all_reduce tensor",
    "all_reduce dict",
    "reduce",
    "all_gather object",
    "all_gather tensor",
    "gather",
    "broadcast",
    "scatter",
    "all_to_all",
    "reduce_scatter",
    "barrier",
)
BLOCKING = {"reduce", "all_to_all"}
# About the room of a slot, what a connection takes at once, and more than that.
LENGTHS = (0, 1, 100, 8000, 9000, 70_000, 3_000_000)
# The faults after which the group goes on, and those after which a rank does not.
ERRORS = ("raise", "differ", "shape", "stop")
ENDS = ("kill", "kill soon", "exit", "raise", "leave")

Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn, *, ends: bool) -> Program:
    """Draw a program; with `ends`, one of its ranks ends in it."""
    size = draw(st.integers(2, 5))
    groups = [list(range(size))]
    open_groups = [0]
    steps: list[list[Any]] = []
    for _ in range(draw(st.integers(3, 20))):
        what = draw(st.sampled_from(["group", "close", "pair", "wait", *["call"] * 6]))
        group = draw(st.sampled_from(open_groups))
        members = range(len(groups[group]))
        if what == "group":
            ranks = draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=size, unique=True).map(sorted))
            steps.append(["group", ranks])
            open_groups.append(len(groups))
            groups.append(ranks)
        elif what == "close" and group:
            steps.append(["close", group])
            open_groups.remove(group)
        elif what == "pair":
            source, destination = draw(st.permutations(members))[:2]
            steps.append(["pair", group, source, destination, draw(st.sampled_from(LENGTHS))])
        elif what == "wait":
            steps.append(["wait"])
        else:
            kind = draw(st.sampled_from(KINDS))
            fault = draw(st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(groups[group]), ways())))
            async_op = kind not in BLOCKING and draw(st.booleans())
            steps.append(["call", group, kind, draw(st.sampled_from(LENGTHS)), async_op, fault])
    end = None
    if ends:
        end = [draw(st.integers(0, len(steps) - 1)), draw(st.integers(0, size - 1)), draw(st.sampled_from(ENDS))]
    return {"size": size, "steps": steps, "seed": draw(st.integers(0, 1000)), "end": end}


def ways() -> st.SearchStrategy[str]:
    """Draw what a rank does in place of its call."""
    return st.sampled_from(ERRORS)
