"""The overhead of engines: from the call to the first all_reduce, and from the last return to the results.

    python -m benchmarks.engines [--rounds 5]

Two ranks on each of two nodes: of a Slurm that is started for this, and of a cluster of Ray. Beside them are submitit
alone, with a process group that the function opens itself, and Ray Train. Prints medians in seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rankwise as rw
from rankwise.launching import SlurmEngine
from tests.clusters.packages import why_not
from tests.clusters.slurm import PACKAGES, slurm

Times = tuple[float, float]


def first_all_reduce() -> Times:
    """Join, and reduce once; when that was done, and when this rank returned."""
    with rw.init():
        rw.all_reduce(1)
        reduced = time.time()
    return reduced, time.time()


def first_of_torch() -> Times:
    """Do the same with torch alone, where the process group has to be opened or is open."""
    import torch.distributed as dist  # noqa: PLC0415 - of a rank

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    import torch  # noqa: PLC0415

    dist.all_reduce(torch.ones(1))
    reduced = time.time()
    dist.destroy_process_group()
    return reduced, time.time()


def of_submitit(port: int) -> Times:
    """Open the process group by the variables of Slurm, as users of submitit do."""
    environ = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS"}
    os.environ.update({name: os.environ[source] for name, source in environ.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return first_of_torch()


def rankwise_launch(_: int) -> list[Times]:
    return rw.launch(first_all_reduce, nproc=4)


def rankwise_on_slurm(_: int) -> list[Times]:
    return rw.launch(first_all_reduce, nproc=2, nnodes=2, on=SlurmEngine())


def submitit_alone(round_number: int) -> list[Times]:
    import submitit  # noqa: PLC0415 - of one row

    executor = submitit.SlurmExecutor(folder="submitit-jobs")
    executor.update_parameters(nodes=2, ntasks_per_node=2, time=5, wckey=None)
    job = executor.submit(of_submitit, 29600 + round_number)
    found: list[Times] = job.results()
    return found


def rankwise_on_ray(_: int) -> list[Times]:
    return rw.launch(first_all_reduce, nproc=2, nnodes=2, on="ray")


def ray_train(round_number: int) -> list[Times]:
    import ray.train  # noqa: PLC0415 - of one row
    import ray.train.torch  # noqa: PLC0415

    folder = Path.cwd() / f"train-{round_number}"

    def loop() -> None:
        reduced, returned = first_of_torch_in_train()
        folder.mkdir(exist_ok=True)
        (folder / str(ray.train.get_context().get_world_rank())).write_text(f"{reduced} {returned}")

    trainer = ray.train.torch.TorchTrainer(
        loop,
        scaling_config=ray.train.ScalingConfig(num_workers=4),
        run_config=ray.train.RunConfig(storage_path=str(Path.cwd() / "storage")),
    )
    trainer.fit()
    lines = [path.read_text().split() for path in folder.iterdir()]
    return [(float(reduced), float(returned)) for reduced, returned in lines]


def first_of_torch_in_train() -> Times:
    """Reduce once in the process group of Ray Train."""
    import torch  # noqa: PLC0415 - of a rank
    import torch.distributed as dist  # noqa: PLC0415

    dist.all_reduce(torch.ones(1))
    return time.time(), time.time()


def measured(run: Callable[[int], list[Times]], round_number: int) -> Times:
    """Return the seconds from the call to the first all_reduce of all ranks, and from the last return to the end."""
    start = time.time()
    times = run(round_number)
    end = time.time()
    return max(reduced for reduced, _ in times) - start, end - max(returned for _, returned in times)


def table(rows: dict[str, Callable[[int], list[Times]]], rounds: int) -> None:
    """Measure rows alternately, after a round that is not counted, and print their medians."""
    found: dict[str, list[Times]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        for name, run in rows.items():
            times = measured(run, number)
            if number:
                found[name].append(times)
    for name, measurements in found.items():
        before, after = (statistics.median(pair[column] for pair in measurements) for column in (0, 1))
        print(f"| {name} | {before:.1f} | {after:.1f} |", flush=True)


def on_slurm(rounds: int) -> None:
    if reason := why_not(PACKAGES):
        print(f"no Slurm: {reason}")
        return
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, slurm(Path(name), nodes=2) as variables:
        os.environ.update(variables, MASTER_ADDR="127.0.0.1")
        table({"launch": rankwise_launch, "on=slurm": rankwise_on_slurm, "submitit alone": submitit_alone}, rounds)


def on_ray(rounds: int) -> None:
    import ray  # noqa: PLC0415 - an extra
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    cluster.add_node(num_cpus=3)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        rows: dict[str, Callable[[int], list[Times]]] = {"launch": rankwise_launch, "on=ray": rankwise_on_ray}
        try:
            import ray.train  # noqa: PLC0415 - needs more packages than ray
        except ImportError as error:
            print(f"no Ray Train: {error}", flush=True)
        else:
            rows["Ray Train"] = ray_train
        table(rows, rounds)
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["slurm", "ray"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is None:
        root = Path(__file__).parents[1]
        print(
            "| 4 ranks | call to first all_reduce (s) | last return to results (s) |\n| --- | --- | --- |", flush=True
        )
        for engine in ("slurm", "ray"):  # a process for each: Ray changes the environment
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.engines",
                    "--only",
                    engine,
                    "--rounds",
                    str(options.rounds),
                ]
                subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    elif options.only == "slurm":
        on_slurm(options.rounds)
    else:
        on_ray(options.rounds)


if __name__ == "__main__":
    main()
