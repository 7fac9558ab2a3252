"""What a host has no more of: an OSError of the launcher's own, as an error that says what to do."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rankwise.errors import LaunchError, RankwiseError

# By Python, and by compiled code.
_NO_THREAD: Final = ("can't start new thread", os.strerror(errno.EAGAIN))


@contextmanager
def convert_resource_errors() -> Iterator[None]:
    """Raise a LaunchError where the launcher itself gets no descriptor, process, thread or memory."""
    try:
        yield
    except RankwiseError:
        raise
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        raise LaunchError(
            f"the ranks cannot be started here: {error.strerror or error}{file}{advice(error.errno or 0)}"
        ) from error
    except RuntimeError as error:
        if not any(phrase in str(error) for phrase in _NO_THREAD):
            raise
        raise LaunchError(f"the ranks cannot be started here: no new thread; {_processes()}") from error


def advice(number: int) -> str:
    """Return what to do about an OSError of this number, after a semicolon; "" if nothing is known."""
    advices: dict[int, Callable[[], str]] = {
        errno.EMFILE: _descriptors,
        errno.ENFILE: lambda: "the whole host has no more of them (fs.file-max)",
        errno.EAGAIN: _processes,
        errno.ENOMEM: lambda: "this host or this job's control group has no memory left; start fewer ranks",
    }
    return f"; {advices[number]()}" if number in advices else ""


def _descriptors() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"a process may open {most} files, and a launcher needs about 30 and 4 for each rank: raise ulimit -n"


def _processes() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "" if most == resource.RLIM_INFINITY else f" (ulimit -u is {most})"
    return f"the user{limit} or the control group (pids.max) may have no more processes and threads: start fewer ranks"
