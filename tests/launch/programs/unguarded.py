"""Starts ranks where nothing guards it."""

import multiprocessing
import pickle
import sys

import rankwise as rw

factor = 10


class Box:
    def __init__(self, content: int) -> None:
        self.content = content


def content_of(box: Box) -> int:
    return box.content


def fill(number: int) -> Box:
    box = pickle.loads(pickle.dumps(Box(factor * number * rw.get_rank())))
    for method in ("spawn", "forkserver"):  # a child has the definitions too, as a worker of a data loader needs them
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(content_of, [box]) == box.content
            assert pool.apply(rw.get_rank) == rw.get_rank()
    return box  # type: ignore[no-any-return]


def start() -> None:
    boxes = rw.launch(fill, 2, nproc=2)
    print([box.content for box in boxes], all(isinstance(box, Box) for box in boxes))


if len(sys.argv) == 1:
    start()
if len(sys.argv) == 2 and __name__ == "__main__":
    start()
if __name__ != "__main__":
    rw.launch(print, "a rank starts ranks", nproc=1)
