"""launch(fn) in a real notebook: functions defined in cells, output at once, and the interrupt button."""

from __future__ import annotations

import os
import signal
import threading
import time

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the kernel's libraries

TRAIN = """
import time
import rankwise

factor = 10

def train(scale):
    with rankwise.init():
        for step in range(2):
            print("step", step, flush=True)
        return rankwise.all_reduce(scale * factor)

rankwise.launch(train, 2, nproc=2)
"""
SAVE = """
import io, torch

class Net(torch.nn.Module):
    pass

def save(net):
    torch.backends.cudnn.benchmark = True
    file = io.BytesIO()
    torch.save(net, file)
    with rankwise.init():
        return file.getvalue(), rankwise.broadcast(Net) is Net, rankwise.all_gather(net)

saved, same, nets = rankwise.launch(save, Net(), nproc=2)[1]
same, type(torch.load(io.BytesIO(saved), weights_only=False)) is Net, [type(net) is Net for net in nets]
"""
FAIL = """
def check(rate):
    if rate < 0:
        raise ValueError("the rate is negative")
    return rankwise.barrier()

def fail():
    with rankwise.init():
        check(-rankwise.get_rank())

rankwise.launch(fail, nproc=2)
"""
WAIT = """
def wait():
    print("waits")
    time.sleep(300)

rankwise.launch(wait, nproc=2)
"""


def client(*cells: str) -> NotebookClient:
    notebook = nbformat.from_dict(  # type: ignore[no-untyped-call]
        {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {},
            "cells": [
                {
                    "id": f"c{place}",
                    "cell_type": "code",
                    "source": cell,
                    "metadata": {},
                    "outputs": [],
                    "execution_count": None,
                }
                for place, cell in enumerate(cells)
            ],
        }
    )
    return NotebookClient(notebook, kernel_name="python3", timeout=200)


@pytest.mark.slow
def test_a_notebook_shows_output_and_results_of_ranks() -> None:
    notebook = client(TRAIN, SAVE).execute()
    outputs = notebook.cells[0].outputs
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert sorted(printed.splitlines()) == [f"[{rank}] step {step}" for rank in (0, 1) for step in (0, 1)]
    assert outputs[-1].data["text/plain"] == "[40, 40]"
    classes = notebook.cells[1].outputs[-1].data["text/plain"]
    assert classes == "(True, True, [True, True])", "its own, in ranks and in what they write"


@pytest.mark.slow
def test_an_error_is_at_its_line_in_its_cell() -> None:
    with pytest.raises(CellExecutionError) as caught:
        client("import rankwise", FAIL).execute()
    consequence = (
        "rank 0 then raised rankwise.errors.CollectiveError: barrier at Cell In[2]:4 failed: rank 1 left with "
    )
    for line in (
        '  File "Cell In[2]", line 8, in fail\n    check(-rankwise.get_rank())\n',
        '  File "Cell In[2]", line 3, in check\n    raise ValueError("the rate is negative")\n',
        f"{consequence}ValueError: the rate is negative (Cell In[2]:3)",
    ):
        assert line in caught.value.evalue
    of_notebook = caught.value.traceback.partition("RankFailedError")[2].partition("rank 1 of 2")[0]
    assert of_notebook.count("File ") <= 1, "below the line of the cell"


@pytest.mark.slow
def test_a_notebook_can_interrupt_ranks() -> None:
    running = client(TRAIN, WAIT, "print('goes on')")
    pids: list[int] = []

    def interrupt() -> None:
        while not any("waits" in output.get("text", "") for output in running.nb.cells[1].get("outputs", [])):
            time.sleep(0.05)
        kernel = running.km.provisioner.process.pid  # type: ignore[union-attr]
        pids.extend(child.pid for child in psutil.Process(kernel).children(recursive=True))
        os.kill(kernel, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        running.execute()
    thread.join()
    deadline = time.monotonic() + 200
    assert len(pids) >= 3
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)
