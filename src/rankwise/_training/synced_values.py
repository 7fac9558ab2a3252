"""The check that values are the same on all ranks, bit by bit."""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import fractions
import hashlib
import pathlib
import sys
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import torch

from rankwise._collectives.all_gather import all_gather
from rankwise._collectives.groups import GroupLike, comm_of
from rankwise._collectives.numpy_arrays import is_array, tensor_from_array
from rankwise._collectives.pytree import PyTree, describe
from rankwise._collectives.rooted import broadcast
from rankwise._comm.buffers import as_bytes, memory_of
from rankwise._comm.comm import Comm
from rankwise._comm.dense_tensors import dense
from rankwise._comm.group import Group
from rankwise._comm.group_rank import GroupRank
from rankwise._text import ranks_text
from rankwise._training.module_wrappers import refuse_fsdp
from rankwise._training.parameters import named_tensors
from rankwise.errors import MismatchError, PayloadTypeError, shown

_DIGEST_BYTES: Final = 16
_NUMBERS: Final = (int, float, complex)
_WITH_DISTANCE: Final = (torch.Tensor, *_NUMBERS)
_NAMESPACES: Final = (argparse.Namespace, types.SimpleNamespace)
# Values whose representation has all that makes them equal, and no address.
_PLAIN_TYPES: Final = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None), range, pathlib.PurePath, uuid.UUID),
    *(dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def assert_synced(value: Any, *, group: GroupLike | None = None) -> None:  # noqa: ANN401 - any value
    """Check that a module, or the values in nested containers, are the same on all ranks, bit by bit.

    Collective over the session, or over `group`. Ranks exchange hashes; only the first tensor that differs is sent.

    Args:
        value: A module, whose parameters and buffers are compared; or a tensor, array, number, text or None, or nested
            containers of these, such as the `state_dict()` of an optimizer. For configurations, also namespaces, sets,
            ranges, paths, members of an Enum, classes, dates, and the dtypes, devices and layouts of torch.
        group: The group whose ranks participate: a `Group`, or a mesh or process group of torch; all ranks by default.

    Raises:
        MismatchError: A value differs: the message has its name, by how much it differs, and on which ranks. Or the
            containers or shapes differ, or another rank calls another collective.
        PayloadTypeError: A value is of another type, or a tensor is not dense.
        InvalidArgumentError: The module is one of FSDP, or has one in it.
        RemoteRankError: One of these errors occurred on another rank.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import torch
        >>> assert_synced({"step": 3, "mean": torch.ones(2)})
    """
    comm = comm_of(group)
    with torch.no_grad():
        with comm.call("assert_synced") as call:
            leaves, structure = _named_leaves(value)
            described = {name: describe(leaf) for name, leaf in leaves.items()}
            call.content, call.parts = f"{structure} {described}", lambda: described
            digests = b"".join(map(_digest, leaves.values()))
            found = call.all_gather(hashlib.blake2b(digests, digest_size=_DIGEST_BYTES).digest())
        if len(set(found)) > 1:
            _raise_difference(comm, leaves, digests)


def _named_leaves(value: object) -> tuple[Mapping[str, Any], str]:
    """Return the values that are compared, by name, and a description of the containers around them."""
    if isinstance(value, torch.nn.Module):
        refuse_fsdp(value, "assert_synced")
        return named_tensors(value), "module"
    structures: list[str] = []
    return dict(_leaves_in(value, "", structures)), " ".join(structures)


def _leaves_in(value: object, path: str, structures: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the values in containers, by name, and append a description of the containers."""
    tree = PyTree.of(value)
    structures.append(tree.text)
    for name, leaf in zip(tree.paths(), tree.leaves, strict=True):
        if isinstance(leaf, _NAMESPACES):
            yield from _leaves_in(vars(leaf), f"{path}{name}", structures)
        else:
            yield f"{path}{name}", tensor_from_array(leaf) if is_array(leaf) else leaf


def _digest(leaf: object) -> bytes:
    if isinstance(leaf, torch.Tensor):
        copied = as_bytes(dense(leaf)).cpu()
        data: Any = memory_of(copied)
    else:
        data = _identity(leaf).encode(errors="backslashreplace")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _identity(leaf: object) -> str:
    """Return a text that equal values have, on any rank.

    Raises:
        PayloadTypeError: The value is of a type for which there is none.
    """
    kind = type(leaf).__qualname__
    if isinstance(leaf, Enum):
        return f"{kind}.{leaf.name}"
    if isinstance(leaf, type):
        return f"{leaf.__module__}.{leaf.__qualname__}"
    if isinstance(leaf, (set, frozenset)):
        return f"{kind} {sorted(map(_identity, leaf))}"
    if isinstance(leaf, tuple):  # of a set
        return f"{kind} {list(map(_identity, leaf))}"
    numpy = sys.modules.get("numpy")
    if isinstance(leaf, _PLAIN_TYPES) or (numpy is not None and isinstance(leaf, (numpy.generic, numpy.dtype))):
        return f"{kind} {leaf!r}"
    raise PayloadTypeError(
        f"assert_synced compares tensors, arrays, numbers, texts, None and other plain values, got {describe(leaf)}"
    )


def _raise_difference(comm: Comm, leaves: Mapping[str, Any], digests: bytes) -> None:
    """Raise, on all ranks, which value differs first, by how much and on which ranks. Collective over the members."""
    of_ranks = [
        [data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES)]
        for data in all_gather(digests, group=Group(comm))
    ]
    different = [index for index, found in enumerate(zip(*of_ranks, strict=True)) if len(set(found)) > 1]
    name, leaf = list(leaves.items())[different[0]]
    is_sent = comm.rank == 0 and isinstance(leaf, _WITH_DISTANCE)
    first = broadcast(leaf if is_sent else None, src=GroupRank(0), group=Group(comm))
    distances = all_gather(_distance(leaf, first), group=Group(comm))
    texts = all_gather("" if isinstance(leaf, torch.Tensor) else shown(leaf), group=Group(comm))
    others = [index for index in range(comm.size) if of_ranks[index][different[0]] != of_ranks[0][different[0]]]
    where = f"on {ranks_text([comm.ranks[index] for index in others])} from rank {comm.ranks[0]}"
    by = _by_at_most([distances[index] for index in others])
    seen = f": {texts[0]}, and {texts[others[0]]} on rank {comm.ranks[others[0]]}" if texts[0] else ""
    raise MismatchError(
        f"{name or 'the value'}, {describe(leaf)}, differs {where}{by}{seen}; "
        f"{len(different)} of {len(leaves)} values differ"
    )


def _distance(value: object, other: object) -> float | None:
    """Return by how much a value differs from another one at most; None if they are no numbers."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        wide = torch.complex128 if value.is_complex() else torch.float64
        difference = (dense(value).cpu().to(wide) - dense(other).cpu().to(wide)).abs()
        return float(difference.max()) if difference.numel() else 0.0
    if isinstance(value, _NUMBERS) and isinstance(other, _NUMBERS):
        return float(abs(value - other))
    return None


def _by_at_most(distances: Sequence[float | None]) -> str:
    known = [distance for distance in distances if distance is not None]
    if not known:
        return ""
    largest = next((distance for distance in known if distance != distance), max(known))  # noqa: PLR0124 - not a number
    return f", by at most {largest:.6g}"
