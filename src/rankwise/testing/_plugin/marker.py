"""The marker `@pytest.mark.ranks(...)`, read and checked: the worlds in which a test runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import pytest

from rankwise.errors import InvalidArgumentError
from rankwise.testing._plugin.timeouts import LONGEST_TEST_SECONDS

SERIAL: Final = "serial"
# The name of the parameter whose values are the worlds of one test.
PARAMETER: Final = "_ranks"

WorldSize = int | str

_LARGEST: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMarker:
    """The arguments of a marker.

    Attributes:
        sizes: The worlds: "serial", or a number of ranks.
        backend: The backend of the session's process group; None for the default of the device.
        timeout: The time limit of one test with its fixtures, in seconds.
        device: Each rank's device, as `rankwise.init` takes it.
    """

    sizes: tuple[WorldSize, ...]
    backend: str | None = None
    timeout: float
    device: str = "cpu"

    @property
    def may_be_unavailable(self) -> bool:
        """A device or backend is specified, which this host may not have."""
        return self.device != "cpu" or self.backend is not None


def read_marker(item: pytest.Item) -> RanksMarker | None:
    """Return a test's marker, or None if it has none. The closest one applies: function, class, module.

    Raises:
        InvalidArgumentError: The marker cannot be used.
    """
    if not isinstance(item, pytest.Function):  # a doctest, in a module with a marker
        return None
    own = [mark for mark in getattr(getattr(item, "callspec", None), "marks", ()) if mark.name == "ranks"]
    marker = own[0] if own else item.get_closest_marker("ranks")
    if marker is None:
        return None
    if own and PARAMETER in item.callspec.params:
        raise InvalidArgumentError("pytest.param(marks=ranks(...)) in a test that runs in several worlds already")
    return _read(marker, item.config.getini("ranks_timeout"))


def world_size_of(item: pytest.Item) -> WorldSize:
    """Return the size of the world that a test runs in; "serial" without a marker.

    Raises:
        InvalidArgumentError: The marker cannot be used.
    """
    marker = read_marker(item)
    if marker is None:
        return SERIAL
    if len(marker.sizes) == 1:
        return marker.sizes[0]
    params = getattr(getattr(item, "callspec", None), "params", {})
    if PARAMETER not in params:
        raise InvalidArgumentError(
            f"ranks{marker.sizes} cannot make several tests of this one: it is a method of unittest.TestCase, or was "
            "marked by pytest.param or after it was collected; give ranks() one size"
        )
    size: WorldSize = params[PARAMETER]
    return size


def size_id(size: WorldSize) -> str:
    """Return the id of a world in the name of a test: "serial", "1rank", "4ranks"."""
    return str(size) if isinstance(size, str) else f"{size}rank{'s' if size > 1 else ''}"


def _read(marker: pytest.Mark, timeout: str) -> RanksMarker:
    options = {"backend": None, "timeout": timeout, "device": "cpu", **marker.kwargs}
    with contextlib.suppress(TypeError, ValueError):
        options["timeout"] = float(options["timeout"])
    unknown = sorted(options.keys() - {"backend", "timeout", "device"})
    problem = ""
    if unknown:
        problem = f"does not take {', '.join(unknown)}; it takes backend, timeout and device"
    elif not marker.args:
        problem = 'needs sizes: numbers of ranks, or "serial"'
    elif wrong := [size for size in marker.args if not _is_size(size)]:
        problem = f'takes numbers of ranks from 1 to {_LARGEST}, or "serial", got {wrong[0]!r}'
    elif len(set(marker.args)) < len(marker.args):
        problem = f"has the same size twice: {marker.args}"
    elif not (isinstance(options["timeout"], float) and 0 < options["timeout"] < LONGEST_TEST_SECONDS):
        problem = f"needs a timeout in seconds above 0, got {options['timeout']!r}; ranks_timeout is the default"
    if problem:
        raise InvalidArgumentError(f"@pytest.mark.ranks {problem}")
    return RanksMarker(sizes=marker.args, **options)


def _is_size(size: object) -> bool:
    if isinstance(size, int) and not isinstance(size, bool):
        return 1 <= size <= _LARGEST
    return size == SERIAL
