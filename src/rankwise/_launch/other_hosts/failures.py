"""An attempt on several hosts: each launcher tells the others through their store that a rank of its host has failed.

So all hosts count the same attempts, restart together, and give up together: they decide about the same failures.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store

from rankwise._launch.other_hosts.watched_hosts import WatchedHosts
from rankwise._net.json_lines import decode_line, encode_line
from rankwise._rendezvous.signed_store import part_of
from rankwise._rendezvous.store import wait_for
from rankwise.errors import RankFailure

_POLL_SECONDS: Final = 0.3
# How long the failures of other hosts are waited for, which stop their ranks before.
_EXCHANGE_SECONDS: Final = 15.0
_CLOSE_SECONDS: Final = 1.0
# How long the store may take to answer when a host is lost, that of the store perhaps.
_ANSWER_SECONDS: Final = 1.0
_FAILED: Final = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """How an attempt has ended on one host.

    Attributes:
        failures: Of its ranks.
        consequence: They are consequences of failures elsewhere.
        step: The highest step that a rank has reported.
    """

    failures: tuple[RankFailure, ...] = ()
    consequence: bool = True
    step: int | None = None


class HostFailures:
    """An attempt on several hosts, in the launcher of one of them.

    Attributes:
        all_finished: The ranks of all hosts have ended without an error.
    """

    def __init__(self, store: Store, host: int, num_hosts: int, watched: WatchedHosts) -> None:
        """Watch the other hosts.

        Args:
            store: The store of the launchers.
            host, num_hosts: The number of this host, and of all.
            watched: The hosts as the watchdog sees them.
        """
        self._have_failed = False
        self._watched = watched
        self.all_finished = False
        self._store = part_of(store, "rankwise-attempt")
        self._host = host
        self._hosts = range(num_hosts)
        self._has_finished = False
        self._over = threading.Event()
        # A thread: a store that does not answer cannot be interrupted by Ctrl-C.
        self._thread = threading.Thread(target=self._watch, daemon=True, name="rankwise-hosts")
        self._thread.start()

    @property
    def lost(self) -> str:
        """Which host is lost, and why; "" if none is."""
        return self._watched.lost

    @property
    def have_failed(self) -> bool:
        """A rank has failed, or a host or the store is lost, as when the launcher of the first host ends."""
        return self._have_failed or bool(self.lost)

    def meet(self) -> None:
        """Wait until the watchdogs of all hosts have met, or a host is lost."""
        self._watched.wait_until_met()

    def can_go_on(self) -> bool:
        """Return whether the launchers may meet again in their store; the watchdog then spares this one."""
        answers: list[bool] = []
        self._unless_lost(lambda: answers.append(not self._store.check(["no key"])), seconds=_ANSWER_SECONDS)
        if answers:
            self._watched.spare_launcher()
        return bool(answers)

    def finish(self) -> None:
        """Tell the others that the ranks of this host have ended without an error."""
        if not self._has_finished:
            self._store.set(f"finished/{self._host}", "")
            self._has_finished = True

    def announce(self) -> None:
        """Tell the others that a rank has failed."""
        self._over.set()
        self._watched.note_failure()
        self._unless_lost(lambda: self._store.set(_FAILED, ""))

    def exchange(
        self, failures: Sequence[RankFailure], *, consequence: bool, step: int | None
    ) -> tuple[list[RankFailure], int | None]:
        """Exchange the failures of this attempt, and return those of the other hosts, causes first, and the last step.

        Args:
            failures: Those of this host.
            consequence: They are consequences of failures elsewhere.
            step: The highest step that a rank of this host has reported.
        """
        found: list[tuple[list[RankFailure], int | None]] = []
        self._unless_lost(lambda: found.append(self._exchange(failures, consequence=consequence, step=step)))
        return found[0] if found else ([], step)

    def _exchange(
        self, failures: Sequence[RankFailure], *, consequence: bool, step: int | None
    ) -> tuple[list[RankFailure], int | None]:
        own = _Attempt(failures=tuple(failures), consequence=consequence, step=step)
        try:
            self._store.set(f"failures/{self._host}", encode_line(own))
            wait_for(self._store, [f"failures/{host}" for host in self._hosts], timeout=_EXCHANGE_SECONDS)
            received = [self._received(host) for host in self._hosts if host != self._host]
        except RuntimeError:
            self._watched.wait_for_verdict()
            return [], step
        with contextlib.suppress(RuntimeError):  # the launcher of the first host has ended, and the store with it
            self._store.set(f"read/{self._host}", "")
            wait_for(self._store, [f"read/{host}" for host in self._hosts], timeout=_CLOSE_SECONDS)
        steps = [each.step for each in (own, *received) if each.step is not None]
        causes_first = sorted(received, key=lambda each: each.consequence)
        return [failure for each in causes_first for failure in each.failures], max(steps, default=None)

    def close(self) -> None:
        """Watch the others no longer."""
        self._over.set()
        self._watched.close()
        self._thread.join(_CLOSE_SECONDS)

    def _unless_lost(self, ask: Callable[[], object], *, seconds: float = 0.0) -> None:
        """Ask the store, in a thread: one that is on a host without power does not answer, and cannot be interrupted.

        Args:
            ask: Asks it; an error of the store is not raised.
            seconds: How long it may take although a host is lost.
        """

        def attempt() -> None:
            with contextlib.suppress(RuntimeError):
                ask()

        thread = threading.Thread(target=attempt, daemon=True, name="rankwise-hosts-store")
        thread.start()
        start = time.monotonic()
        while thread.is_alive() and not (self.lost and time.monotonic() - start >= seconds):
            thread.join(_POLL_SECONDS)

    def _watch(self) -> None:
        try:
            while not self._over.wait(_POLL_SECONDS):
                if self._store.check([_FAILED]):
                    self._have_failed = True
                    return
                if self._has_finished and self._store.check([f"finished/{host}" for host in self._hosts]):
                    self.all_finished = True
                    return
        except RuntimeError:
            self._have_failed = True

    def _received(self, host: int) -> _Attempt:
        """Return the end of the attempt on another host; nothing where it has told none that can be read."""
        key = f"failures/{host}"
        with contextlib.suppress(ValueError):  # of a launcher of another version
            if self._store.check([key]):
                return decode_line(_Attempt, self._store.get(key))
        return _Attempt()
