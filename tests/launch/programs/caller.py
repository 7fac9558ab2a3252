"""Starts ranks of its own functions, with its own classes, and prints what they found, as JSON."""

import dataclasses
import enum
import io
import json
import logging
import pickle
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import rankwise as rw

torch.set_default_dtype(torch.float64)
logging.basicConfig(level=logging.INFO)
REGISTRY: dict[str, Any] = {}


def registered(fn: Any) -> Any:
    REGISTRY[fn.__name__] = fn
    return fn


@dataclasses.dataclass(frozen=True)
class Config:
    lr: float = 0.1


class Phase(enum.Enum):
    TRAIN = 1


class Strange(Exception):  # noqa: N818 - it is one of the user's
    pass


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))


class Numbers(Dataset[float]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return Config(index + 1.0).lr


@registered
def look(config: Config, also: Any) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True  # a module that cannot be pickled
    saved = io.BytesIO()
    torch.save(Net(), saved)
    with rw.init(timeout=100.0):
        gathered: list[Any] = [None, None]
        torch.distributed.all_gather_object(gathered, config)
        return {
            "argv": sys.argv[1:],
            "flags": [sys.flags.optimize, sys.warnoptions, sys.get_int_max_str_digits()],
            "effects": [str(torch.ones(1).dtype), logging.getLogger().level, sorted(REGISTRY)],
            "set later": later,
            "also": also(),
            "module": Config.__module__,
            "pickled": [isinstance(config, Config), pickle.loads(pickle.dumps(config)) == config],
            "saved": b"__main__" in saved.getvalue() and b"__mp_main__" not in saved.getvalue(),
            "gathered": gathered == [config, config] == rw.all_gather(config),
            "broadcast": rw.broadcast(Phase.TRAIN) is Phase.TRAIN,
            "config": config,
        }


def load() -> float:
    return sum(float(batch) for batch in DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"))


def fail() -> None:
    raise Strange("one of the script's own")


if __name__ == "__main__":
    later = "set below the guard"
    offset = 5
    found = rw.launch(look, Config(3.0), lambda: offset, nproc=2)
    came_back = [isinstance(rank.pop("config"), Config) for rank in found]
    if "load" in sys.argv:
        found.append(rw.launch(load, nproc=1))
    try:
        rw.launch(fail, nproc=1)
    except rw.RankFailedError as error:
        came_back.append(isinstance(error.__cause__, Strange))
    print(json.dumps([found, came_back]))
