"""Groups whose members exchange no frames, as those of more than 64 ranks on several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rankwise._collectives.groups import comm_of
from rankwise._comm.group import Group


@contextmanager
def without_frames(group: Group) -> Iterator[None]:
    """Let the members of a group agree through its data plane, in a block."""
    comm = comm_of(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.control, "uses_frames", False)
        patch.setattr(comm.planes, "planes", comm.planes.planes[-1:])  # the others need frames
        comm.control.agree_by(comm.planes.planes[-1])
        yield
