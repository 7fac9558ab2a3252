"""Every variable that determines the rank of a process, counts its restarts, or is checked for completeness.

Code that hides a launcher from a process removes these. `tests/environment/test_variables.py` compares the list with
the names in the source.
"""

from __future__ import annotations

from typing import Final

from rankwise._environment.detect import LAUNCHERS
from rankwise._environment.facts import OVERRIDES
from rankwise._environment.nesting import AGENT_VARIABLES, OUTER, RANK_VARIABLES, RUN
from rankwise._environment.restarts import RESTART_COUNTS
from rankwise._environment.unsupported import UNSUPPORTED

VARIABLES: Final = frozenset(
    {
        *OVERRIDES,
        *(name for launcher in LAUNCHERS for name in launcher.variables),
        *(RUN, OUTER, *AGENT_VARIABLES, *RESTART_COUNTS),
        *(name for names in RANK_VARIABLES.values() for name in names),
        *(name for launcher in UNSUPPORTED for name in (launcher.rank, launcher.world_size)),
    }
)
