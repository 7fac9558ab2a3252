"""Limits of resources that a launcher exceeds: errors of the system, converted to errors that advise the user."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rankwise.errors import LaunchError, RankwiseError

# The messages of Python, and of compiled code, when a thread cannot be started.
_THREAD_MESSAGES: Final = ("can't start new thread", os.strerror(errno.EAGAIN))


@contextmanager
def convert_resource_errors() -> Iterator[None]:
    """Raise a LaunchError where the launcher itself cannot get a descriptor, process, thread or memory."""
    try:
        yield
    except RankwiseError:
        raise
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        raise LaunchError(
            f"the ranks cannot be started here: {error.strerror or error}{file}{advice_for(error.errno or 0)}"
        ) from error
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in _THREAD_MESSAGES):
            raise
        raise LaunchError(f"the ranks cannot be started here: no new thread; {_advice_for_processes()}") from error


def advice_for(number: int) -> str:
    """Return advice for an OSError with this errno, after a semicolon; "" if there is none."""
    advices: dict[int, Callable[[], str]] = {
        errno.EMFILE: _advice_for_descriptors,
        errno.ENFILE: lambda: "the whole host has no more of them (fs.file-max)",
        errno.EAGAIN: _advice_for_processes,
        errno.ENOMEM: lambda: "this host or this job's control group has no memory left; start fewer ranks",
    }
    return f"; {advices[number]()}" if number in advices else ""


def _advice_for_descriptors() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"a process may open {most} files, and a launcher needs about 30 and 4 for each rank: raise ulimit -n"


def _advice_for_processes() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "" if most == resource.RLIM_INFINITY else f" (ulimit -u is {most})"
    return f"the user{limit} or the control group (pids.max) may have no more processes and threads: start fewer ranks"
