"""Prints what a script can see of itself."""

import atexit
import gc
import json
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import warnings

import __main__


class OfMain:
    """A class of the main module, which is pickled by its name."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = object.__hash__


def double(number: int) -> int:
    return 2 * number


def main() -> None:
    handlers = {
        number.name: str(signal.getsignal(number)) for number in signal.valid_signals() if hasattr(number, "name")
    }
    with multiprocessing.Pool(2) as pool:
        doubled = pool.map(double, range(3))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(double, range(3))
    seen = {
        "name": __name__,
        "file": __file__,
        "spec": [__spec__.name, __spec__.origin] if __spec__ else None,
        "package": __package__,
        "doc": __doc__,
        "loader": type(globals()["__loader__"]).__name__,
        "cached": repr(globals().get("__cached__")),
        "annotations": repr(globals().get("__annotations__")),
        "builtins": type(__builtins__).__name__,
        "main": [__main__ is sys.modules["__main__"], __main__.__dict__ is globals()],
        "names": sorted(name for name in globals() if name.startswith("__")),
        "argv": sys.argv,
        "orig_argv": [word for word in sys.orig_argv[1:] if word != "-B"],  # by PYTHONDONTWRITEBYTECODE
        "main thread": threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
        "path": sys.path,
        "flags": [sys.flags.optimize, sys.flags.dont_write_bytecode, sys.flags.ignore_environment],
        "executable": sys.executable,
        "cwd": os.getcwd(),  # noqa: PTH109 - as it is spelt
        "umask": os.umask(0o22),
        "affinity": sorted(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
        "environ": {name: value for name, value in os.environ.items() if name in {"HOME", "ODD", "PATH", "LANG"}},
        "unset": "RANKWISE_RANK" in os.environ,
        "signals": handlers,
        "threads": [thread.name for thread in threading.enumerate()],
        "mask": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__],
        "streams": [
            [stream.encoding, stream.errors, stream.fileno(), stream.isatty(), stream.name, stream.mode]
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "originals": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__],
        "stdin": sys.stdin.read(),
        "logging": [logging.root.level, len(logging.root.handlers)],
        "filters": len(warnings.filters),
        "pickled": pickle.loads(pickle.dumps(OfMain())) == OfMain(),
        "start method": multiprocessing.get_start_method(),
        "process": multiprocessing.current_process().name,
        "recursion": sys.getrecursionlimit(),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "pool": [doubled, spawned],
        "random": random.random() != 0.5,  # noqa: S311
        "trace": sys.gettrace() is None,
    }
    print(json.dumps(seen))
    atexit.register(print, "at exit")
    threading.Timer(0.2, print, args=["a thread"]).start()


if __name__ == "__main__":
    main()
