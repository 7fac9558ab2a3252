"""Starts ranks where nothing guards it."""

import pickle
import sys

import rankwise as rw

factor = 10


class Box:
    def __init__(self, content: int) -> None:
        self.content = content


def fill(number: int) -> Box:
    return pickle.loads(pickle.dumps(Box(factor * number * rw.get_rank())))  # type: ignore[no-any-return]


def start() -> None:
    boxes = rw.launch(fill, 2, nproc=2)
    print([box.content for box in boxes], all(isinstance(box, Box) for box in boxes))


if len(sys.argv) == 1:
    start()
if len(sys.argv) == 2 and __name__ == "__main__":
    start()
if __name__ != "__main__":
    rw.launch(print, "a rank starts ranks", nproc=1)
