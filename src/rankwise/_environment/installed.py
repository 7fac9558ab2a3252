"""Launchers that other installed packages add, as entry points of the group "rankwise.launchers".

They are looked up once for each process, when the launchers before them in the order are not present. One that cannot
be used is logged, and otherwise as if its package was not installed, unless the program names it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from typing import Final, TypeVar

from rankwise._environment.facts import Environ, LaunchEnvironment
from rankwise._environment.own_launcher import Launcher
from rankwise.errors import InvalidArgumentError, LauncherEnvironmentError, shown, summary

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP: Final = "rankwise.launchers"


class InstalledLauncher:
    """A launcher of another package: its errors name the package."""

    def __init__(self, name: str, package: str, launcher: Launcher) -> None:
        self.name = name
        self.description = f"{launcher.description} (of the package {package})"
        self.variables: tuple[str, ...] = tuple(getattr(launcher, "variables", ()))
        self.verified = False
        self._package = package
        self._launcher = launcher
        self._has_raised = False

    def present(self, environ: Environ) -> bool:
        try:
            return bool(self._launcher.present(environ))
        except Exception as error:  # noqa: BLE001 - of another package, which this process may have nothing to do with
            if not self._has_raised:  # processes come here before each collective, if they are alone
                log.warning("launcher %r of the package %s is ignored: present() raised %s", *self._raised(error))
            self._has_raised = True
            return False

    def read(self, environ: Environ) -> LaunchEnvironment:
        try:
            reading = self._launcher.read(environ)
        except LauncherEnvironmentError:
            raise
        except Exception as error:
            raise LauncherEnvironmentError(
                "launcher {!r} of the package {} cannot read its variables: read() raised {}".format(
                    *self._raised(error)
                )
            ) from error
        if not isinstance(reading, LaunchEnvironment):
            raise LauncherEnvironmentError(
                f"launcher {self.name!r} of the package {self._package} cannot read its variables: read() returned "
                f"{shown(reading)}, not a LaunchEnvironment"
            )
        return reading

    def _raised(self, error: Exception) -> tuple[str, str, str]:
        return self.name, self._package, summary(error)


class UnusableLauncher:
    """A launcher of another package that cannot be loaded. It is never present, and an error for those who name it."""

    def __init__(self, name: str, package: str, problem: str) -> None:
        self.name = name
        self.description = f"cannot be used: {problem} (of the package {package})"
        self.variables: tuple[str, ...] = ()
        self.verified = False
        self._error = f"launcher {name!r} of the package {package} cannot be used: {problem}"

    def present(self, environ: Environ) -> bool:  # noqa: ARG002 - whatever the variables
        return False

    def read(self, environ: Environ) -> LaunchEnvironment:  # noqa: ARG002 - whatever the variables
        raise InvalidArgumentError(self._error)


@functools.cache
def installed_launchers(known: Collection[str]) -> tuple[Launcher, ...]:
    """Return the launchers of other packages, in the order of their names.

    Args:
        known: The names of rankwise's own launchers, which others cannot have.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import, and not needed under torchrun

    found: dict[str, Launcher] = {}
    for entry_point in sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value)):
        name, package = entry_point.name, "?" if entry_point.dist is None else entry_point.dist.name
        if name in known or name in found or name == "auto":
            log.warning("launcher %r of the package %s is ignored: there is another of that name", name, package)
            continue
        try:
            found[name] = InstalledLauncher(name, package, _checked(name, entry_point.load()))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the import of another package raises
            problem = summary(error)
            log.warning("launcher %r of the package %s is ignored: %s", name, package, problem)
            found[name] = UnusableLauncher(name, package, problem)
    return tuple(found.values())


def _checked(name: str, loaded: Launcher | Callable[[], Launcher]) -> Launcher:
    """Return the launcher that an entry point refers to: an object, or a class that is called without arguments.

    Raises:
        TypeError: It is not a launcher of that name.
    """
    launcher = loaded() if isinstance(loaded, type) else loaded
    for attribute in ("name", "description"):
        if not isinstance(getattr(launcher, attribute, None), str):
            raise TypeError(f"{type(launcher).__qualname__} has no text `{attribute}`")
    for method in ("present", "read"):
        if not callable(getattr(launcher, method, None)):
            raise TypeError(f"{type(launcher).__qualname__} has no method `{method}`")
    if launcher.name != name:  # type: ignore[union-attr]  # checked above
        raise TypeError(f"its name is {launcher.name!r}, not {name!r}")  # type: ignore[union-attr]
    return launcher  # type: ignore[return-value]  # likewise
