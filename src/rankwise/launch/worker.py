"""One rank of `launch(fn)`: run the function, and leave its outcome where the launcher looks.

Started as `python -m rankwise.launch.worker FOLDER`. The folder is the launcher's own, and closed to other users.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from rankwise.launch.outcome import CALL_FILE, Outcome, outcome_file


def main(folder: Path, rank: int) -> int:
    """Run the call in the folder, and return the exit code."""
    search_path, call = pickle.loads((folder / CALL_FILE).read_bytes())
    sys.path[:] = search_path
    try:
        fn, args = pickle.loads(call)
        outcome, code = Outcome(value=_pickled_result(fn(*args)), time_ns=time.monotonic_ns()), 0
    except SystemExit as error:
        # As the shell sees it: one byte.
        code = error.code & 0xFF if isinstance(error.code, int) else 0 if error.code is None else 1
        if not isinstance(error.code, int) and error.code is not None:
            sys.stderr.write(f"{error.code}\n")
        outcome = Outcome(value=cloudpickle.dumps(None) if code == 0 else b"", time_ns=time.monotonic_ns())
    except BaseException as error:  # noqa: BLE001 - it goes to the launcher, whatever it is
        code = 1
        outcome = Outcome(error=_pickled_error(error), traceback=_text(error), time_ns=time.monotonic_ns())
    partial = outcome_file(folder, rank).with_suffix(".partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.replace(outcome_file(folder, rank))
    return code


def _pickled_result(value: Any) -> bytes:  # noqa: ANN401 - any value of the user's
    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__qualname__}, which cannot be pickled: {error}"
        ) from error
    return pickled


def _pickled_error(error: BaseException) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(error)
        pickle.loads(pickled)  # an exception whose __init__ takes other arguments can be pickled but not read again
    except Exception:  # noqa: BLE001 - its text travels in any case
        return b""
    return pickled


def _text(error: BaseException) -> str:
    """Return the traceback without this file's own frames, which are not the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(os.environ["RANK"])))
