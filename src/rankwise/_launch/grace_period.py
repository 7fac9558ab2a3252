"""The grace periods: how long ranks may take to end after a signal, before the next one, and SIGKILL at last."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final, TypeAlias

# After Ctrl-C, to save a checkpoint for example; and for the exit of a rank whose target has failed. See `--grace`.
GRACE_SECONDS: Final = 10.0

# Signals in the order in which ranks get them, each with its grace period in seconds. SIGKILL follows the last one.
StopSignals: TypeAlias = Sequence[tuple[signal.Signals, float]]

AFTER_FAILURE: Final = ((signal.SIGTERM, 3.0),)
# After the loss of another host, for which the ranks have waited long.
AFTER_LOSS: Final = ((signal.SIGTERM, 1.0),)
# After SIGTERM to the launcher, unless the user gave more: schedulers wait that long.
_TERMINATION_SECONDS: Final = 30.0


def after_interrupt(grace: float) -> StopSignals:
    """Return the signals that ranks get after Ctrl-C."""
    return (signal.SIGINT, grace), (signal.SIGTERM, 0.5)


def after_termination(grace: float) -> StopSignals:
    """Return the signals that ranks get after the launcher was terminated."""
    return ((signal.SIGTERM, max(grace, _TERMINATION_SECONDS)),)
