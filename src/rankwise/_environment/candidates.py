"""Why a launcher was chosen, or was not: the names that its `present` looks up, and which of them are set.

It needs nothing of the launchers but the interface that they have, so it holds for those of other packages too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rankwise._environment.detect import LAUNCHERS, check_environ, launcher_named, launchers
from rankwise._environment.facts import Environ
from rankwise._environment.nesting import without_outer_ranks
from rankwise.errors import shown

# How much of a variable's value a reason shows.
_SHOWN: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A launcher that was looked for.

    Attributes:
        name: Its name, as `init(launcher=)` takes it.
        chosen: Its variables are the ones that are read.
        reason: Why it was chosen, or was not: names variables.
    """

    name: str
    chosen: bool
    reason: str


def candidates(environ: Environ, launcher: str = "auto") -> tuple[Candidate, ...]:
    """Return every launcher in the order in which `detect` looks for them, with the reason for its decision.

    Local. It does not read the facts: variables that the chosen launcher cannot read are an error of `detect` alone.

    Raises:
        InvalidArgumentError: There is no launcher of that name, or `environ` is not a mapping of strings to strings.

    Example:
        >>> found = candidates({"RANK": "3", "WORLD_SIZE": "8"})
        >>> [candidate.reason for candidate in found if candidate.name in {"plain", "openmpi"}]
        ['RANK and WORLD_SIZE are set', 'OMPI_COMM_WORLD_RANK is not set']
    """
    check_environ(environ)
    named = launcher_named(launcher)
    inner = without_outer_ranks(environ, LAUNCHERS)
    known = launchers()
    chosen = named or next(one for one in known if one.present(inner))
    return tuple(
        Candidate(
            name=one.name,
            chosen=one is chosen,
            reason=_why_chosen(one.present, inner, is_named=named is not None)
            if one is chosen
            else f"{chosen.name!r} was named"
            if named is not None
            else _why_not(one.present, environ, inner, chosen=chosen.name),
        )
        for one in known
    )


def recognized_by(present: Callable[[Environ], bool]) -> tuple[str, ...]:
    """Return the names of the variables that a launcher's `present` looks up."""
    lookups = _Lookups({}, default="0")
    present(lookups)
    return tuple(lookups.names)


def _why_chosen(present: Callable[[Environ], bool], environ: Environ, *, is_named: bool) -> str:
    lookups = _Lookups(environ)
    if not present(lookups):
        return f"it was named, but {_why_absent(lookups.names, environ)}"
    found = _are_set(name for name in lookups.names if name in environ)
    if is_named:
        return f"it was named, and {found}" if found else "it was named"
    return found or "no other launcher's variables are set"


def _why_not(present: Callable[[Environ], bool], environ: Environ, inner: Environ, *, chosen: str) -> str:
    """Return why a launcher was not chosen.

    Args:
        present: The launcher's.
        environ: The variables of the process.
        inner: Those without an outer rank's.
        chosen: The name of the launcher that was chosen.
    """
    lookups = _Lookups(inner)
    if present(lookups):
        found = _are_set(name for name in lookups.names if name in inner)
        return f"{found} too, but {chosen!r} comes before it" if found else "the variables of another launcher are set"
    if inner is not environ and present(environ):
        return f"its variables are those of the rank of rankwise launch that has started {chosen!r}"
    return _why_absent(lookups.names, inner)


def _are_set(names: Iterable[str]) -> str:
    listed = tuple(names)
    return f"{' and '.join(listed)} {'is' if len(listed) == 1 else 'are'} set" if listed else ""


def _why_absent(names: list[str], environ: Environ) -> str:
    """Return why a launcher is not present that has looked up these names."""
    missing = [name for name in names if name not in environ]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
    values = " and ".join(f"{name}={shown(environ[name], _SHOWN)}" for name in names)
    return f"{values}, which a rank that it started does not have" if names else "its variables are not set"


class _Lookups(Mapping[str, str]):
    """Variables that record which names were looked up."""

    def __init__(self, environ: Environ, default: str | None = None) -> None:
        self._environ = environ
        self._default = default
        self.names: list[str] = []

    def __getitem__(self, name: str) -> str:
        if name not in self.names:
            self.names.append(name)
        return self._environ[name] if self._default is None else self._default

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)
