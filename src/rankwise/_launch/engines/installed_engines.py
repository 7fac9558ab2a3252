"""The engines that installed packages have, rankwise's own among them: entry points of the group "rankwise.engines"."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from rankwise._launch.engines.interface import Engine
from rankwise.errors import InvalidArgumentError, LaunchError, shown, summary

GROUP: Final = "rankwise.engines"
_METHODS: Final = ("submit", "wait", "cancel", "logs")


def find_engine(on: str | Engine) -> Engine:
    """Return the engine of a name, with its defaults, or the engine itself.

    Raises:
        InvalidArgumentError: There is no engine of that name, or the object is none.
        LaunchError: The engine of that name cannot be loaded.
    """
    if not isinstance(on, str):
        _check(on, f"on={shown(on)}")
        return on
    found: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=GROUP)}
    if on not in found:
        raise InvalidArgumentError(
            f"on={on!r} is not an engine; there are {', '.join(sorted(found)) or 'none, as rankwise is not installed'}"
            ", and None for this host"
        )
    try:
        engine = found[on].load()()
    except Exception as error:
        raise LaunchError(f"engine {on!r} ({found[on].value}) cannot be loaded: {summary(error)}") from error
    _check(engine, f"engine {on!r} ({found[on].value})")
    return engine  # type: ignore[no-any-return]  # checked


def _check(engine: object, what: str) -> None:
    missing = [name for name in _METHODS if not callable(getattr(engine, name, None))]
    if missing or isinstance(engine, type) or not isinstance(getattr(engine, "name", None), str):
        raise InvalidArgumentError(
            f"{what} is not an engine: it has no {', '.join(missing) or 'name, or is a class'}; an engine is an object "
            "as in rankwise.extend.engines"
        )
