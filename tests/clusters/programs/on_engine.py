"""Launch functions on an engine, and print as JSON what comes back.

on_engine.py ENGINE MODE
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import rankwise as rw
from rankwise._launch.engines import slurm_files
from rankwise.launching import RayEngine, SlurmEngine, launch_many

EXAMPLE = Path(__file__).parents[3] / "examples"


def digits() -> tuple[int, int, float, float]:
    """Train the example's network; the rank, its world, and what the ranks have evaluated and got right."""
    sys.path.insert(0, str(EXAMPLE))
    example = importlib.import_module("digits")
    torch.set_num_threads(1)
    with rw.init():
        images, labels, test_images, test_labels = example.load(rw.device())
        model = example.build(rw.device())
        example.train(model, images, labels, epochs=2, batch=64, learning_rate=5e-3)
        return rw.get_rank(), rw.get_world_size(), *example.count_right(model, test_images, test_labels)


def place() -> tuple[int, int, int, str, int]:
    """Return the rank, the number of ranks, that of the node, its address for rank zero's, and a sum over the ranks."""
    with rw.init():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
            address = probe.getsockname()[0]
        return rw.get_rank(), rw.get_world_size(), rw.get_node_rank(), address, rw.all_reduce(rw.get_rank())


def fail(how: str) -> None:
    """Fail in rank 2, while the others wait for it."""
    with rw.init():
        if rw.get_rank() == 2:
            if how == "raise":
                raise ValueError("no data")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "breakpoint":
                breakpoint()  # noqa: T100 - which is refused
            if how == "input":
                input()
        rw.barrier()
        time.sleep(100)


def run_until_killed(folder: str) -> None:
    """Say in a file where this rank runs, and wait for the end of all ranks."""
    name = os.environ.get("SLURMD_NODENAME") or os.environ["NODE_RANK"]
    with rw.init():
        (Path(folder) / f"{rw.get_rank()}.{os.getpid()}").write_text(name)
        time.sleep(200)


def run_until_signal(folder: str) -> tuple[int, int]:
    """Wait for SIGUSR2 at the first start, and exit with an error; return the rank and the number of restarts."""
    restarts, got = rw.restart_count(), threading.Event()
    signal.signal(signal.SIGUSR2, lambda *_: got.set())
    with rw.init():
        if not restarts:
            (Path(folder) / f"{rw.get_rank()}.{os.getpid()}").write_text("")
            got.wait(200)
            raise SystemExit(3)
        return rw.get_rank(), restarts


def run_until_stopped(folder: str, reason: str) -> tuple[int, int, str | None]:
    """Stop by the signal, or by the limit of the job, at the first start; return the rank, the restarts and the end."""
    restarts = rw.restart_count()
    if not restarts and reason == "limit":
        os.environ["SLURM_JOB_END_TIME"] = str(round(time.time()) + 5)  # which older versions of Slurm do not set
    with rw.init(), rw.Stop() as stop, rw.Checkpoints(Path(folder) / "saves") as saves:
        saves.load()
        if not restarts:
            if reason == "signal":
                (Path(folder) / f"{rw.get_rank()}.{os.getpid()}").write_text("")
            while not stop.agreed():
                time.sleep(0.01)
            saves.save(1, reason=stop.reason)
            if reason == "limit":
                (Path(folder) / f"{rw.get_rank()}.{os.getpid()}").write_text("")
            return -1, -1, None
        return rw.get_rank(), restarts, saves.values["reason"]


EVALUATE = """
import os, pathlib
kept = [name for name in os.environ if name.startswith("SLURM_ARRAY")]
pathlib.Path("evaluated." + os.environ["SLURM_JOB_ID"]).write_text(f"{kept} {os.environ.get('FROM_OUTSIDE')}")
"""


def submit_others(number: int) -> int:
    """In a job of an array: submit a script, and a job that outlives this one."""
    Path(f"trained.{os.environ['SLURM_JOB_ID']}").write_text(str(number))
    Path(f"evaluate{number}.py").write_text(EVALUATE)
    submit = [sys.executable, "-m", "rankwise", "submit", f"evaluate{number}.py", "--memory", "10M", "--time", "5"]
    subprocess.run(submit, check=True)
    later = f"touch waits.{number}; until [ -e go ]; do sleep 0.1; done; touch outlived.{number}"
    subprocess.run(["sbatch", "--export=ALL", "-n1", "--mem=10M", "--wrap", later], check=True)
    while not Path(f"waits.{number}").exists():
        time.sleep(0.1)
    return number


def fill_disk() -> None:
    """Make the record of a job fail, as on a full disk."""
    slurm_files.write_size = lambda *_: Path("/dev/full").write_text("{}")  # type: ignore[assignment]


def describe(error: Exception) -> dict[str, Any]:
    """Return an error as values of JSON."""
    fields = {name: getattr(error, name, None) for name in ("rank", "host", "exitcode", "traceback")}
    return {"kind": type(error).__name__, "message": str(error), "cause": repr(error.__cause__), **fields}


def main() -> None:
    name, mode, *rest = sys.argv[1:]
    engine: Any = {"slurm": SlurmEngine(folder=str(Path.cwd() / "jobs")), "ray": RayEngine(), "none": None}[name]
    sizes = {"nproc": 4} if engine is None else {"nproc": 2, "nnodes": 2, "on": engine}
    try:
        if mode == "digits":
            print(json.dumps(rw.launch(digits, **sizes)))
        elif mode == "places":
            print(json.dumps(rw.launch(place, **sizes)))
        elif mode == "requeue":
            how: Any = run_until_stopped if len(rest) > 1 else run_until_signal
            # Those of `Stop` have the time to return by themselves.
            seconds = 100 if how is run_until_stopped else 13
            requeued = SlurmEngine(folder=engine.folder, time=5, signal_seconds=seconds, requeue=1)
            print(json.dumps(rw.launch(how, *rest, nproc=2, nnodes=2, on=requeued)))
        elif mode == "array":
            os.environ |= {"SBATCH_EXPORT": "NONE", "FROM_OUTSIDE": "yes"}
            small = SlurmEngine(folder=engine.folder, time=5, options={"mem-per-cpu": "10M"})
            print(json.dumps(launch_many(submit_others, [(0,), (1,)], nproc=1, on=small)))
        elif mode == "full disk":
            fill_disk()
            rw.launch(run_until_killed, *rest, **sizes)
        elif mode == "wait":
            rw.launch(run_until_killed, *rest, **sizes)
        else:
            rw.launch(fail, mode, **sizes)
    except (rw.RankwiseError, OSError) as error:
        print(json.dumps(describe(error)))


if __name__ == "__main__":
    main()
