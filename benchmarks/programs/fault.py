"""One of two ranks, the second of which has the fault that the argument names; the first waits for it."""

import ctypes
import faulthandler
import importlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

KIND, MOMENT = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])


class OnlyHereError(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("it does not travel")


def fail(error: BaseException) -> None:
    raise error


def fail_in_turn() -> None:
    try:
        fail(KeyError("first"))
    except KeyError as error:
        raise RuntimeError("second") from error


def kill(number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def end_launcher(number: signal.Signals) -> None:
    os.kill(int(MOMENT.with_suffix(".pid").read_text()), number)
    time.sleep(300)


def use_up_memory() -> None:
    import torch  # noqa: PLC0415 - some faults come before

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.ones(1 << 28)


def fill_disk() -> None:
    with Path("/dev/full").open("w") as log:
        log.write("x" * 100_000)


def print_into_nothing() -> None:
    os.close(1)
    print("lost", flush=True)


def die_while_joining() -> None:
    import torch.distributed as dist  # noqa: PLC0415 - some faults come before

    dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    kill()


EARLY: dict[str, Callable[[], object]] = {
    "import error": lambda: importlib.import_module("no_such_module"),
    "syntax error": lambda: compile("print('a'", "train.py", "exec"),
    "death before joining": kill,
    "death while joining": die_while_joining,
}
LATE: dict[str, Callable[[], object]] = {
    "raise": lambda: fail(ValueError("the loss is not a number")),
    "raise from another": fail_in_turn,
    "exit 3": lambda: sys.exit(3),
    "exit None, early": sys.exit,
    "os._exit(1)": lambda: os._exit(1),
    "SIGKILL": kill,
    "SIGSEGV": faulthandler._sigsegv,  # type: ignore[attr-defined]  # noqa: SLF001 - it raises a real SIGSEGV
    "SIGABRT": os.abort,
    "out of memory": use_up_memory,
    "10 MB exception": lambda: fail(ValueError("x" * 10_000_000)),
    "exception that does not travel": lambda: fail(OnlyHereError("local")),
    "disk full": fill_disk,
    "stdout closed": print_into_nothing,
    "others blocked in C++": kill,
    "others ignore SIGTERM": kill,
    "a child holds the output": kill,
    "launcher killed": lambda: end_launcher(signal.SIGKILL),
    "launcher terminated": lambda: end_launcher(signal.SIGTERM),
    "Ctrl-C": lambda: end_launcher(signal.SIGINT),
}


def fault(faults: dict[str, Callable[[], object]]) -> None:
    """Have the fault, if it is one of these and this is the rank, and note when."""
    if RANK == 1 and KIND in faults:
        MOMENT.write_text(str(time.time()))
        faults[KIND]()


def main() -> None:
    fault(EARLY)
    import torch.distributed as dist  # noqa: PLC0415 - some faults come before

    dist.init_process_group("gloo")
    if KIND == "a child holds the output":
        subprocess.Popen(["/bin/sleep", "20"], start_new_session=True)
    if KIND == "others ignore SIGTERM" and RANK == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    time.sleep(0.2 * RANK)
    fault(LATE)
    if KIND == "others blocked in C++" or KIND.startswith(("launcher", "Ctrl-C")):
        ctypes.CDLL(None).sleep(300)
    if KIND == "others ignore SIGTERM":
        time.sleep(300)
    dist.barrier()


if __name__ == "__main__":
    main()
