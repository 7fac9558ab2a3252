"""The agreement by which all ranks refuse a value with `safe=True`, before any of them has unpickled it.

Each rank inspects the values that it receives, since a rank that means harm does not inspect what it sends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from rankwise._arguments import as_bool
from rankwise._collectives.safe_pickles import RefusedError, inspect
from rankwise._collectives.serialization import Header, pickle_of
from rankwise._comm.comm import Comm
from rankwise._comm.control.protocol import Call
from rankwise.errors import PayloadTypeError, printable, shortened, summary

_SETTING: Final = "safe"
# A message goes with a frame.
_MOST_CHARACTERS: Final = 1000


def set_safe(call: Call, safe: object) -> None:
    """Add the argument `safe` to the settings of a call, which have to be the same on all ranks.

    Raises:
        InvalidArgumentError: It is not a bool.
    """
    if safe is not False and as_bool(safe, _SETTING):
        call.settings = {**call.settings, _SETTING: True}


def is_safe(call: Call) -> bool:
    """Return whether a call has `safe=True`."""
    return _SETTING in call.settings


def refuse_unsafe(comm: Comm, call: Call, values: Iterable[tuple[int, Header, Mapping[str, torch.Tensor]]]) -> None:
    """Check the values that this rank receives, if the call has `safe=True`.

    Collective over the members, in the block of the call and after its agreements.

    Args:
        comm: The group.
        call: The call.
        values: The global rank of the sender, the header and the buffers of each value.

    Raises:
        PayloadTypeError: A value is refused, here or on another rank. It is the same error on all ranks.
    """
    if not is_safe(call):
        return
    call.begin_data()
    problem = next(filter(None, (_problem(*value) for value in values)), "")
    message = shortened(problem, _MOST_CHARACTERS).encode(errors="backslashreplace")
    for answer in comm.all_gather_bytes(call, message):
        if answer:
            call.agreement_failed = True  # all members know it
            raise PayloadTypeError(printable(answer.decode(errors="replace")))


def _problem(rank: int, header: Header, buffers: Mapping[str, torch.Tensor]) -> str:
    """Return why a value is refused; "" if it is not."""
    try:
        inspect(pickle_of(header, buffers).stream)
    except RefusedError as error:
        return f"a value of rank {rank} {_refusal(error.module, error.name)}"
    except Exception as error:  # noqa: BLE001 - whatever a pickle that was not made by rankwise leads to
        return f"a value of rank {rank} cannot be read with safe=True: {summary(error)}"
    return ""


def _refusal(module: str, name: str) -> str:
    if module.startswith("cloudpickle."):
        return "has a function or class that is not found by its name, which safe=True refuses"
    full = name if module == "__main__" else f"{module}.{name}"
    found = getattr(sys.modules.get(module), "__dict__", {}).get(name)
    if found is not None and not isinstance(found, type):
        return f"refers to {full}, which safe=True refuses"
    return f"has a {full}, which safe=True refuses; register it with rankwise.register_safe({full})"
