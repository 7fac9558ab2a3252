"""Random numbers on several ranks: a stream for each rank, and blocks in which all ranks draw the same numbers.

Both are derived from a seed, so that no file is needed for them, with any number of ranks. They are the global streams
of Python, numpy and torch, on the CPU and on every device. A DataLoader takes the seed of its workers from the stream
of torch: so these differ between ranks, too, whatever their start method is.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils.data import get_worker_info

from rankwise._arguments import as_integer
from rankwise._collectives.groups import comm_of
from rankwise._session.getters import get_rank
from rankwise.errors import InvalidArgumentError, shown

_BITS: Final = 64
# Odd: its multiples below 2**32 times are different in their low 32 bits, all that torch's generator uses of a seed.
_ODD: Final = 0x9E3779B1


def seed(seed: int, *, step: int = 0) -> None:
    """Seed Python's, numpy's and torch's random numbers, on all devices, with a stream of this rank's own.

    Local, also before `init()`. For dropout and augmentation, which have to differ between ranks; workers of a
    DataLoader get other streams on each rank, too. Where ranks have to draw the same numbers, use `same_seed`. In a
    worker of a DataLoader, the stream is that of the worker.

    Args:
        seed: At least 0, below 2**64; the same on all ranks.
        step: Where a resumed run goes on, so that it does not draw the numbers of the first steps again.

    Raises:
        InvalidArgumentError: An argument is not as above.
        LauncherEnvironmentError: The launcher's variables are incomplete or contradictory.

    Example:
        >>> import rankwise, torch
        >>> rankwise.seed(0)
        >>> torch.rand(1)  # on another rank, another number
        tensor([0.3098])
    """
    number, at = as_seed(seed, "seed"), as_seed(step, "step")
    worker = get_worker_info()
    index = get_rank() if worker is None else get_rank() * worker.num_workers + worker.id
    base = derived_seed(f"{number} {at} {'rank' if worker is None else 'worker'}")
    # The low bits are different for each index, for certain.
    _seed_all((base >> 32 << 32) | (base + index * _ODD) % (1 << 32))


@contextmanager
def same_seed(seed: int) -> Iterator[None]:
    """Draw the same random numbers on all ranks in a block, as for the initial values of a model.

    Local. In the block, `random`, numpy and torch are as after `random.seed(seed)`, `numpy.random.seed(seed)` and
    `torch.manual_seed(seed)`; after it, they are as before. Each block begins anew: pass another seed for each.

    Args:
        seed: At least 0, below 2**64; the same on all ranks.

    Raises:
        InvalidArgumentError: `seed` is not as above.

    Example:
        >>> import rankwise, torch
        >>> rankwise.seed(0)
        >>> with rankwise.same_seed(0):
        ...     model = torch.nn.Linear(4, 1)  # with the same parameters on all ranks
    """
    number = as_seed(seed, "seed")
    before = random_state()
    _seed_all(number)
    try:
        yield
    finally:
        set_random_state(before)


def random_state() -> dict[str, Any]:
    """Return the state of the random numbers of this rank, for its part of a checkpoint.

    Local. Numbers, texts, tuples and tensors on the CPU, which `torch.load` accepts by default: "python", "numpy" if it
    is imported, "torch", and the type of an accelerator, with the state of each device.

    Example:
        >>> import rankwise, torch
        >>> state = rankwise.random_state()
        >>> first = torch.rand(1)
        >>> rankwise.set_random_state(state)
        >>> bool(first == torch.rand(1))
        True
    """
    return {name: read() for name, (read, _) in _generators().items()}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the random numbers of this rank to a state of `random_state()`.

    Local. A rank for which there is no state, as in a larger world, calls `seed(seed, step=step)`.

    Args:
        state: The state of a process with the same generators.

    Raises:
        InvalidArgumentError: It is no such state; or one with other generators, or another number of devices.

    Example:
        >>> from rankwise import random_state
        >>> state = random_state()
        >>> set_random_state(state)
    """
    generators = _generators()
    if not isinstance(state, Mapping) or set(state) != set(generators):
        found = ", ".join(map(str, state)) if isinstance(state, Mapping) else shown(state)
        raise InvalidArgumentError(
            f"the state is of the generators {found}, and this process has {', '.join(generators)}; without a state, "
            "call rankwise.seed(seed, step=step)"
        )
    for name, (_, write) in generators.items():
        try:
            write(state[name])
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            raise InvalidArgumentError(f"{name!r} of the state is not one of this generator: {error}") from error


def random_streams() -> dict[str, list[list[int]]]:
    """Return which ranks draw the same random numbers: for each generator, the ranks by the state that they have.

    Collective over the session.

    Raises:
        RemoteRankError: Another rank failed.
        MismatchError: Another rank calls another collective.
        CollectiveError: A rank is dead, or did not call within the session's timeout.
        NotJoinedError: The world has more than one rank, and this process has not joined it.

    Example:
        >>> import rankwise
        >>> rankwise.seed(0)
        >>> rankwise.random_streams()["torch"]  # on 2 ranks: [[0], [1]]; after torch.manual_seed(0): [[0, 1]]
        [[0]]
    """
    comm = comm_of(None)
    with comm.call("random_streams") as call:
        digests = "\n".join(f"{name} {_digest(part)}" for name, part in random_state().items())
        gathered = call.all_gather(digests.encode())
    streams: dict[str, dict[str, list[int]]] = {}
    for rank, message in zip(comm.ranks, gathered, strict=True):
        for name, _, digest in (line.partition(" ") for line in message.decode().splitlines()):
            streams.setdefault(name, {}).setdefault(digest, []).append(rank)
    return {name: list(ranks_of.values()) for name, ranks_of in streams.items()}


def as_seed(value: object, name: str) -> int:
    """Return an integer that generators take as a seed.

    Raises:
        InvalidArgumentError: It is not.
    """
    number = as_integer(value, name)
    if not 0 <= number < 1 << _BITS:
        raise InvalidArgumentError(f"{name}={shown(value)} is not from 0 to 2**{_BITS} - 1")
    return number


def derived_seed(text: str) -> int:
    """Return a seed that follows from a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=_BITS // 8, person=b"rankwise seed").digest()
    return int.from_bytes(digest, "little")


def _seed_all(number: int) -> None:
    random.seed(number)
    numpy = _numpy()
    if numpy is not None:
        low, high = number % (1 << 32), number >> 32
        numpy.random.seed([low, high] if high else low)
    torch.manual_seed(number)  # of all devices


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return the generators of this process: how the state of each is read and set."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "python": (random.getstate, _set_python),
        "torch": (torch.get_rng_state, lambda state: torch.set_rng_state(state.cpu())),
    }
    if _numpy() is not None:
        found["numpy"] = _numpy_state, _set_numpy
    # A worker of a loader has no devices: forked, it could not use those of its parent.
    accelerator = torch.accelerator.current_accelerator(check_available=True) if get_worker_info() is None else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        # All functions but those of MPS take the index of a device.
        places = [()] if accelerator.type == "mps" else [(index,) for index in range(module.device_count())]

        def set_devices(states: list[torch.Tensor]) -> None:
            if len(states) != len(places):
                raise ValueError(f"it has {len(states)} devices, and there are {len(places)}")
            for place, state in zip(places, states, strict=True):
                module.set_rng_state(state.cpu(), *place)

        found[accelerator.type] = lambda: [module.get_rng_state(*place) for place in places], set_devices
    return found


def _set_python(state: tuple[Any, ...]) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(words), gauss))


def _numpy() -> Any:  # noqa: ANN401 - numpy may not be installed; torch has imported it if it is
    return sys.modules.get("numpy")


def _numpy_state() -> tuple[Any, ...]:
    kind, words, *rest = _numpy().random.get_state()
    return (kind, words.tolist(), *rest)


def _set_numpy(state: tuple[Any, ...]) -> None:
    _numpy().random.set_state(tuple(state))


def _digest(state: Any) -> str:  # noqa: ANN401 - of any generator
    plain = [part.tolist() for part in state] if isinstance(state, list) else state
    plain = plain.tolist() if isinstance(plain, torch.Tensor) else plain
    return hashlib.blake2b(repr(plain).encode(), digest_size=16).hexdigest()
