"""accelerate launch, which starts several processes through torch's elastic agent."""

from __future__ import annotations

from rankwise._environment.facts import Environ
from rankwise._environment.torchrun import Torchrun


class AccelerateLaunch(Torchrun):
    """`accelerate launch` with several processes.

    Reads the variables of torchrun; and recognizes those that begin with ACCELERATE_, with which it passes its options.
    A single process, as of `accelerate launch --cpu`, has no variables of a rank and is a world of one.
    """

    name: str = "accelerate"
    description: str = "accelerate launch"

    def present(self, environ: Environ) -> bool:
        return super().present(environ) and any(name.startswith("ACCELERATE_") for name in environ)
