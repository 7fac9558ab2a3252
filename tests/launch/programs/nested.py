"""Starts ranks from a child of every start method, and lets ranks use a manager's queue."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import rankwise as rw


class Box:
    def __init__(self, content: int) -> None:
        self.content = content


def fill(number: int) -> Box:
    return Box(number + rw.get_rank())


def child(number: int) -> tuple[list[int], bool]:
    boxes = rw.launch(fill, number, nproc=2)
    return [box.content for box in boxes], all(isinstance(box, Box) for box in boxes)


if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            print(method, *pool.submit(child, 10).result(50))
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        rw.launch(queue.put, 3, nproc=1)
        print(queue.get(timeout=100))
