"""Rank zero, which serves the store, is killed while torch makes a group for ranks of several hosts."""

import os
import signal

import pytest
import torch.distributed as dist

import rankwise as rw
from rankwise._comm.control.registry import GroupRegistry

with pytest.MonkeyPatch.context() as patch:
    several = {"one_host": False, "own_address": lambda: "127.0.0.1"}
    patch.setattr("rankwise._session.lifecycle.GroupRegistry", lambda **more: GroupRegistry(**more | several))
    with rw.init(timeout=280):
        rw.barrier()
        if rw.get_rank() == 0:
            patch.setattr(dist, "new_group", lambda *_, **_more: os.kill(os.getpid(), signal.SIGKILL))
        try:
            rw.new_group([0, 1])
        except rw.CollectiveError as error:
            print(error)
