"""What the launcher knows of the modules that its fork server imports, and the messages about them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

from rankwise._launch.forkserver.ipc import ServerEvent

# How long an import may take before a message names it.
_SILENT_SECONDS: Final = 10.0


class PreloadProgress:
    """The imports of a fork server.

    Attributes:
        is_over: The fork server has imported all modules, and starts ranks.
        current: The module that it imports now; "" for torch, and after the last.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.is_over = not names
        self.current = ""
        self._since = time.monotonic()
        self._not_preloaded: dict[str, str] = {}

    def record(self, event: ServerEvent, text: str) -> None:
        """Record IMPORTING or NOT_PRELOADED."""
        if event is ServerEvent.NOT_PRELOADED:
            name, _, reason = text.partition("\0")
            self._not_preloaded[name] = reason
        else:
            self.current, self._since = text, time.monotonic()
            self.is_over = not text

    def messages(self) -> Iterator[str]:
        """Yield the messages that are due, each once."""
        if self.current and time.monotonic() - self._since > _SILENT_SECONDS:
            yield f"rankwise: still importing {self.current}, as --preload asks for; Ctrl-C ends it"
            self._since = float("inf")
        if self.is_over and self._not_preloaded:
            reasons = "; ".join(f"{name} ({reason})" for name, reason in self._not_preloaded.items())
            yield f"rankwise: not preloaded, but imported by each rank: {reasons}"
            self._not_preloaded.clear()
