"""What a launcher's class has: for those of other packages, and more for rankwise's own."""

from __future__ import annotations

from typing import Protocol

from rankwise._environment.facts import Environ, LaunchEnvironment


class Launcher(Protocol):
    """One launcher: how to recognize that it started this process, and how to read its variables.

    Both methods are pure: they read nothing but the variables that are passed.
    """

    @property
    def name(self) -> str:
        """The name of the launcher, as `init(launcher=)` takes it."""

    @property
    def description(self) -> str:
        """The programs that start processes with these variables, in a few words."""

    def present(self, environ: Environ) -> bool:
        """Return whether this launcher set these variables, judging by those that no other launcher sets."""

    def read(self, environ: Environ) -> LaunchEnvironment:
        """Read the facts.

        Raises:
            LauncherEnvironmentError: A variable is missing, unreadable, or contradicts another.
        """


class OwnLauncher(Launcher, Protocol):
    """A launcher that rankwise reads: its variables are data, for tables of launchers and for tests that clear them."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Every variable that is read, the one for the rank first."""

    @property
    def verified(self) -> bool:
        """Whether the variables were seen on the real launcher, or are only those of its documentation and source."""
