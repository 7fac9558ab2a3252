"""The checks of `tools.gpu_first_hour`: programs for ranks with an accelerator each, and what they have to print.

A program runs with `rankwise launch`, on any accelerator that torch knows. A line "measured: ..." is shown in the
table, and a line "not seen: ..." takes the place of the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check.

    Attributes:
        question: What it answers.
        ranks: The number of ranks, and of devices unless `devices` says otherwise; 0 for a program without a launcher.
        program: The program.
        expected: Texts of which each has to be in the output, of the ranks or of the launcher.
        devices: How many devices the check needs.
        environ: Variables for it.
        limit: After how many seconds it is ended.
    """

    question: str
    ranks: int
    program: str
    expected: tuple[str, ...]
    devices: int
    environ: dict[str, str] = field(default_factory=dict)
    limit: float = 90.0


def _check(
    question: str,
    ranks: int,
    program: str,
    *expected: str,
    devices: int | None = None,
    limit: float = 90.0,
    **environ: str,
) -> Check:
    return Check(
        question=question, ranks=ranks, program=_BEGIN + program, expected=expected, environ=environ, limit=limit,
        devices=max(ranks, 1) if devices is None else devices,
    )  # fmt: skip


_BEGIN = """\
import os, statistics, sys, time
import torch, torch.distributed as dist
import rankwise as rw
start = time.perf_counter()
rank = int(os.environ.get("RANK", "0"))
kind = torch.accelerator.current_accelerator().type
own = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
def measured(text):
    if rank == 0:
        print("measured:", text, flush=True)
def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
"""

_RATE = """
x = torch.ones(1 << 26, device=own)
def rate(copy):
    copy()
    torch.accelerator.synchronize()
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        copy()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return x.nbytes / statistics.median(times) / 1e9
"""

CHECKS = (
    _check("1. The flight record of the device's backend is read", 1, """
from rankwise._torch import flight_records, recorded_backends
with rw.init() as session:
    rw.all_reduce(torch.ones(4, device=own))
    found = {name: len(record.get("entries", [])) for name, record in flight_records(collectives=True).items()}
    backend = dict(part.split(":") for part in session.backend.split(","))[kind]
    if backend in recorded_backends():
        measured(f"entries {found}")
        print("recorded" if found[backend] else "empty")
    else:
        print("not seen:", backend, "has no record")
""", "\nrecorded"),
    _check("2. A hang of torch's collectives is reported, with the missing rank", 2, """
with rw.init(timeout=60):
    for step in range(3):
        if step == 2 and rank == 1:
            time.sleep(25)
            os._exit(0)
        x = torch.ones(1000, device=own)
        dist.all_reduce(x)
        x.sum().item()
""", "missing: rank 1", RANKWISE_HANG_SECONDS="4"),
    _check("3. An adopted group without a current device: each rank on its own", 2, """
dist.init_process_group(device_id=own)
with rw.init() as session:
    print("device of rank", rank, "is right" if session.device == own else session.device)
    rw.all_gather({"x": torch.ones(2, device=own)})
""", "device of rank 0 is right", "device of rank 1 is right"),
    _check("4. Another operation on one rank is an error on both", 2, """
with rw.init(timeout=20):
    print(rank, error_of(lambda: rw.all_reduce(torch.ones(70000, device=own), op="max" if rank else "sum")))
""", "0 MismatchError", "1 MismatchError"),
    _check("4. What an agreement costs", 2, """
def median(check):
    with rw.init(check=check):
        x = torch.ones(4, device=own)
        times = []
        for _ in range(300):
            begin = time.perf_counter()
            rw.all_reduce(x)
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[100:])
pairs = [(median(True), median(False)) for _ in range(3)]
with_check, without = (statistics.median(times) * 1e6 for times in zip(*pairs))
measured(f"all_reduce of 16 bytes: {with_check:.0f} us, with check=False {without:.0f} us")
print("done")
""", "done"),
    _check("5. A rank that is killed releases one that waits for its device", 2, """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's
try:
    with rw.init(timeout=120):
        for step in range(100):
            x = torch.ones(1000, device=own)
            if step == 3 and rank == 1:
                os.kill(os.getpid(), 9)
            start = time.perf_counter()
            dist.all_reduce(x)
            x.sum().item()
finally:
    measured(f"after {time.perf_counter() - start:.1f} s")
""", "rank 1 of 2", "killed by SIGKILL", "measured: after"),
    _check("6. A group that its members make alone", 3, """
import rankwise.compat.ignite as idist
with rw.init(timeout=30):
    if rank < 2:
        print("members:", idist.all_reduce(torch.ones(2, device=own), group=[0, 1]).tolist())
""", "members: [2.0, 2.0]"),
    _check("7. Two ranks on one device are told so, and what to do", 2, """
print(error_of(lambda: rw.init(timeout=30)))
measured(f"after {time.perf_counter() - start:.1f} s")
""", "JoinError", "have the same device", devices=1, CUDA_VISIBLE_DEVICES="0"),
    _check("8. A gathered tensor takes no second buffer", 2, """
with rw.init():
    x = torch.ones(1 << 24, device=own)
    rw.all_gather_cat(x)
    memory = getattr(torch.accelerator, "max_memory_allocated", None)
    try:
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        result = rw.all_gather_cat(x)
        measured(f"peak {(torch.accelerator.max_memory_allocated() - before) / result.nbytes:.2f} of the result")
    except (AttributeError, RuntimeError, AssertionError) as error:
        measured("not known on this device")
print("done")
""", "done"),
    _check("9. A first transfer of some ranks in an unbound group", 3, """
torch.accelerator.set_device_index(own.index)
dist.init_process_group(f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}")
with rw.init(timeout=30):
    parts = rw.gather({"x": torch.ones(2, device=own)} if rank < 2 else None, dst=0)
    print("gathered" if parts else "sent")
""", "gathered"),
    _check("10. Means of integers", 1, """
with rw.init():
    mean = rw.all_reduce(torch.tensor([1, 2], device=own), op="mean")
    measured(f"{mean.dtype} on {mean.device.type}")
    print("mean", mean.tolist())
""", "mean [1.0, 2.0]"),
    _check("12. A deadlock with a backward pass is found at once", 2, """
with rw.init(timeout=60):
    group = rw.new_group([0, 1])
    x = torch.ones(3 + rank, device=own, requires_grad=True)
    loss = torch.stack([part.sum() for part in rw.all_gather(x, differentiable=True)]).sum()
    start = time.perf_counter()
    print(rank, error_of(loss.backward if rank == 0 else lambda: rw.all_reduce(1, group=group)))
    measured(f"after {time.perf_counter() - start:.1f} s")
""", "0 MismatchError: deadlock", "1 MismatchError: deadlock"),
    _check("13. Results of launch() are on the CPU, and the caller opens no device", 0, """
def run():
    with rw.init() as session:
        return torch.ones(2, device=session.device)
if __name__ == "__main__":
    (result,) = rw.launch(run, nproc=1)
    module = torch.get_device_module(kind)
    print("result on", result.device.type, "opened" if module.is_initialized() else "not opened")
""", "result on cpu not opened"),
    _check("14. The device before init() leaves forks able to use it", 0, """
import multiprocessing
def use():
    torch.ones(1, device=own)
if __name__ == "__main__":
    rw.device()
    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join()
    print("exit code", child.exitcode)
""", "exit code 0"),
    _check("15. Non-blocking calls of several groups do not wait for each other", 2, """
with rw.init(timeout=60):
    groups = [rw.new_group([0, 1]) for _ in range(3)]
    x, total = torch.ones(1000, device=own), 0.0
    for _ in range(100):
        works = [rw.all_reduce(x, group=group, async_op=True) for group in groups]
        total += sum(work.wait()[0].item() for work in works)
    print("total", total)
""", "total 600.0"),
    _check("16. Interfaces of NCCL are not inherited", 1, """
print("NCCL_SOCKET_IFNAME" in os.environ and "inherited" or "clean")
""", "clean"),
    _check("17. What staging gains from pinned memory", 1, _RATE + """
pinned = torch.empty(x.shape, pin_memory=True)
measured(f"to the CPU: {rate(x.cpu):.1f} GB/s; into pinned memory: {rate(lambda: pinned.copy_(x)):.1f} GB/s")
print("done")
""", "done"),
    _check("20. A tensor on another rank's device is refused before the exchange", 2, """
with rw.init(timeout=30):
    x = torch.ones(4, device=torch.device(kind, 0))
    print(rank, error_of(lambda: rw.all_reduce(x)))
    print("usable", rw.all_reduce(torch.ones(1, device=own)).item())
""", "1 PayloadTypeError", "0 RemoteRankError", "usable 2.0"),
    _check("20. Device tensors in a session on the CPU", 2, """
with rw.init(timeout=30, device="cpu"):
    parts = rw.all_gather(torch.ones(rank + 1, device=own))
    print("lengths", [part.numel() for part in parts])
""", "lengths [1, 2]"),
)  # fmt: skip
