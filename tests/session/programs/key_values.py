"""Ranks use the store of their session, until a rank vanishes or the session ends; also of an adopted group."""

import os
import signal
import sys

import torch.distributed as dist

import rankwise as rw

how, who = sys.argv[1], int(sys.argv[2])


def kill_one() -> None:
    rw.barrier()
    if rw.get_rank() == who:
        rw.store().set("its last", "value")
        os.kill(os.getpid(), signal.SIGKILL)


if how == "adopted":
    dist.init_process_group(sys.argv[3], init_method=sys.argv[4], rank=rw.get_rank(), world_size=rw.get_world_size())
    store = rw.store()  # before the first collective
    assert store.add("arrived") <= rw.get_world_size()
    store.set(f"from {rw.get_rank()}", bytes([rw.get_rank()]))
    found = [store.get(f"from {rank}") for rank in range(rw.get_world_size())]
    assert store.compare_set("one", None, "same") in {True, False}
    rw.barrier()
    print(found, store.add("arrived", 0), store.get("one"), store.delete("missing"))
    rw.barrier()
    dist.destroy_process_group()
    try:
        store.check("one")
    except rw.NotJoinedError as error:
        print(error)
    sys.exit()

if how == "not joined":
    try:
        rw.store()
    except rw.NotJoinedError as error:
        print(error)
    sys.exit()

try:
    with rw.init(timeout=280):
        store = rw.store()
        if how == "ends":
            store.set(f"key {rw.get_rank()}", "x")
            store.wait([f"key {rank}" for rank in range(rw.get_world_size())])
        elif how == "in vain":
            kill_one()
            assert store.get("its last") == "value"
            store.get("missing")
        elif how == "late":
            kill_one()
            try:
                store.get("missing", timeout=3)
            finally:
                store.add("done")
                while rw.get_rank() == 0 and store.add("done", 0) < rw.get_world_size() - 1:
                    pass
        elif how == "served by it":
            kill_one()
            while True:
                store.get("missing")
    store.check("key 0")
except rw.RankwiseError as error:
    print(type(error).__name__, str(error).splitlines()[0])
if how == "ends":  # a session of its own has a store of its own
    with rw.init(timeout=280):
        print(rw.store().check("key 0"), rw.store() is store)
